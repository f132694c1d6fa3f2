"""A program run stage by stage in one process computes what the model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slapo_core import TraceError, build_program

from ..stage_comparison import assert_same, assert_same_as_model, cut, loss_of, received
from ..toy_models import Counts, InPlace, Regions, Skips, Structures

SKIPS = {"x": torch.randn(4, 8), "labels": torch.randn(4, 1)}


def test_a_skip_passes_through_the_stages_between() -> None:
    program = assert_same_as_model(Skips(), SKIPS, "a", "b", "c")
    assert received(program) == [[(4, 8)], [(4, 8), (4, 8)], [(4, 8), (4, 8)]]
    assert program.stages[2].inputs[0].name == program.stages[3].inputs[0].name == "a"


def test_what_a_stage_reads_from_the_batch_is_not_sent() -> None:
    program = assert_same_as_model(Skips(), SKIPS, "b")
    assert [stage.batch_inputs for stage in program.stages] == [("x",), ("labels",)]


@pytest.mark.parametrize("paths", [("opening",), ("opening", "a", "first"), ("a", "b"), ("first",)])
@pytest.mark.parametrize("mask", [None, torch.rand(4, 1)])
def test_structures_between_modules(paths: tuple[str, ...], mask: torch.Tensor | None) -> None:
    assert_same_as_model(Structures(), {"x": torch.randn(4, 8), "mask": mask}, *paths)


@pytest.mark.parametrize("paths", [("a",), ("b",), ("norm",), ("a", "b", "norm")])
@pytest.mark.parametrize("training", [True, False])
def test_gradient_regions_frozen_weights_and_buffers(paths: tuple[str, ...], training: bool) -> None:
    program = assert_same_as_model(Regions().train(training), {"x": torch.randn(4, 8)}, *paths)
    keys = [set(stage.module.state_dict()) for stage in program.stages]
    assert set().union(*keys) == set(program.module.state_dict())


@pytest.mark.parametrize("paths", [("a",), ("b",), ("a", "b")])
def test_changes_in_place(paths: tuple[str, ...]) -> None:
    assert_same_as_model(InPlace(), {"x": torch.randn(4, 8)}, *paths)


def test_cuts_at_different_depths() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))),
        nn.Linear(1, 1),
    )
    program = build_program(cut(model, {"input": torch.randn(2, 8)}, "0.1", "0", "1.2.0"))
    assert [stage.paths for stage in program.stages] == [("0.0", "0.1"), ("0.2",), ("1.0", "1.1", "1.2.0"), ("1.2.1", "2")]


def test_stages_hold_the_models_own_modules_and_unused_ones_too() -> None:
    model = Skips()
    model.spare = nn.Linear(3, 3)
    model.register_buffer("constant", torch.ones(2))
    program = build_program(cut(model, SKIPS, "b"))
    first, last = (stage.module for stage in program.stages)
    assert first.get_submodule("a") is model.a
    assert type(last.get_submodule("d")) is type(model.d)
    assert {*first.state_dict(), *last.state_dict()} == set(model.state_dict())
    assert not {*first.state_dict()} & {*last.state_dict()}


class Gains(nn.Module):
    """Parameters in a list and a dict, one for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.gains = nn.ParameterList(torch.ones(4) for _ in range(4))
        self.shifts = nn.ParameterDict({f"at{index}": torch.zeros(4) for index in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) * self.gains[index] + self.shifts[f"at{index}"]
        return x.sum()


def test_a_part_of_a_list_of_parameters_can_be_printed() -> None:
    program = assert_same_as_model(Gains(), {"x": torch.randn(2, 4)}, "layers.1")
    assert ["(gains)" in repr(stage.module) for stage in program.stages] == [True, True]


def test_another_shape_and_the_other_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 1))
    program = build_program(cut(model, {"input": torch.randn(2, 8)}, "0", "2"))
    for training, rows in [(False, 3), (True, 3), (False, 5)]:
        model.train(training)
        x = torch.randn(rows, 8)
        torch.manual_seed(2)
        expected = model(x)
        torch.manual_seed(2)
        assert_same(program(input=x), expected, "outputs")


def test_a_plan_is_made_once() -> None:
    program = build_program(cut(Skips(), SKIPS, "b"))
    assert program.replan is not None
    assert program.replan(True, SKIPS) is program
    assert program.replan(False, SKIPS) is not program
    assert program.module.training


class Scaled(nn.Module):
    """Reads numbers of its own, of a config and of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.temperature, self.sizes, self.a.factor = 1.0, {"shift": [0.5]}, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x) * self.temperature * self.a.factor
        return self.b(x + self.sizes["shift"][0]).mean()


def test_an_attribute_that_changes_makes_a_new_plan() -> None:
    model, x = Scaled(), torch.randn(4, 8)
    program = build_program(cut(model, {"x": x}, "a"))
    assert program.replan is not None
    model.temperature, model.unread = 1.0, 5
    assert program.replan(True, {"x": x}) is program
    for change in (
        lambda: setattr(model, "temperature", 5.0),
        lambda: setattr(model.a, "factor", 3.0),
        lambda: model.sizes["shift"].append(1.0) or model.sizes["shift"].pop(0),
    ):
        change()
        torch.testing.assert_close(program(x=x), model(x))
    with pytest.raises(TraceError, match=r"attribute [a-z.]+(\['shift'\]\[0\])? is .*, traced as .*; trace again"):
        program.stages[0].module(x=x)


class Asks(nn.Module):
    """Does something else where there are no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) if torch.is_grad_enabled() else -self.a(x)
        return self.b(y if y.grad_fn is not None else y * 3).mean()


def test_a_forward_that_asks_for_the_gradient_mode() -> None:
    model, x = Asks(), torch.randn(4, 8)
    program = build_program(cut(model, {"x": x}, "a"))
    torch.testing.assert_close(program(x=x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(program(x=x), model(x))
        with pytest.raises(TraceError, match="asks for is_grad_enabled, which is False"):
            program.stages[0].module(x=x)


def test_one_tensor_for_two_arguments() -> None:
    x = torch.randn(4, 1).expand(4, 8).contiguous()

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(left) + right).mean()

    model = Twins()
    program = build_program(cut(model, {"left": x, "right": x}, "a"))
    other = torch.randn(4, 8)
    assert_same(program(left=x, right=other), model(x, other), "outputs")


def test_positional_example_inputs() -> None:
    model = Skips()
    program = build_program(cut(model, (SKIPS["x"], SKIPS["labels"]), "b"))
    assert_same(program(**SKIPS), model(**SKIPS), "outputs")


def test_weights_on_meta() -> None:
    with torch.device("meta"):
        model = Skips()
    program = build_program(cut(model, SKIPS, "a", "c"))
    assert [stage.paths for stage in program.stages] == [("a",), ("b", "c"), ("d", "head")]


@settings(max_examples=15)
@given(st.sets(st.integers(0, 5), min_size=1), st.data())
def test_any_cut_of_any_wiring(cuts: set[int], data: st.DataObject) -> None:
    """Blocks that take the sum of any earlier results."""
    sources = [data.draw(st.sets(st.integers(0, block), min_size=1)) for block in range(7)]

    class Wired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values = [x]
            for block, inputs in zip(self.blocks, sources, strict=True):
                values.append(torch.tanh(block(sum(values[index] for index in sorted(inputs)))))  # type: ignore[arg-type]
            return values[-1].pow(2).mean()

    torch.manual_seed(0)
    model = Wired()
    assert_same_as_model(model, {"x": torch.randn(2, 4)}, *(f"blocks.{index}" for index in sorted(cuts)))
    assert loss_of(model(torch.zeros(1, 4))).isfinite()


@pytest.mark.parametrize(("changes", "reads"), [((0,), (0, 2)), ((2,), (2,)), ((0,), ())])
def test_a_changed_buffer_of_one_stage(changes: tuple[int, ...], reads: tuple[int, ...]) -> None:
    assert_same_as_model(Counts(changes, reads), {"x": torch.randn(4, 8)}, "a")


class Then(nn.Module):
    """A layer and what is done with its result."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(8, 8), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.layer(x))


class Turned(nn.Module):
    """Model whose first part returns a non-contiguous tensor that reaches the second through a function."""

    def __init__(self, turn: Any, use: Any) -> None:
        super().__init__()
        self.a, self.b, self.use = Then(turn), nn.Linear(8, 8), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.use(self.a(x))).mean()


def over_a_reshaped_copy(y: torch.Tensor) -> torch.Tensor:
    z = y.reshape(-1)
    z.mul_(3)
    return y + z.view(8, 8)


def over_a_contiguous_copy(y: torch.Tensor) -> torch.Tensor:
    z = y.contiguous()
    z.mul_(3)
    return y + z


@pytest.mark.parametrize(
    "turn",
    [
        lambda y: y.t(),
        lambda y: y[:1].expand(8, 8),
        lambda y: y.repeat(1, 2)[:, 4:12],
        lambda y: torch.cat([y, y]).as_strided((8, 8), (4, 1)),
    ],
    ids=["transposed", "expanded", "cut out", "overlapping"],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.as_strided((4, 8), y.stride()) * 2,
        lambda y: y * y.stride(0) if not y.is_contiguous() else -y,
        over_a_reshaped_copy,
        over_a_contiguous_copy,
    ],
    ids=["strides", "questions", "reshape", "contiguous"],
)
def test_what_is_not_contiguous_keeps_its_layout(turn: Any, use: Any) -> None:
    model, x = Turned(turn, use), torch.randn(8, 8)
    program = assert_same_as_model(model, {"x": x}, "a")
    model.zero_grad()
    before = copy.deepcopy(model)
    (given,) = program.stages[0].module(x=x)
    sent = given.detach().contiguous().requires_grad_()
    assert sent.stride() == (8, 1)
    torch.testing.assert_close(program.stages[1].module(sent), before(x))
    program.stages[1].module(sent).backward()
    given.backward(sent.grad)
    before(x).backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in before.named_parameters()}, "grad")
