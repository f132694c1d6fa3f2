"""``find`` and what takes what it finds, on modules that nobody has traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slapo_core import ScheduleError, TraceError, create_schedule
from slapo_tracing import Pattern
from slapo_tracing.matching.patterns import call_module
from tests.zoo.families import FAMILIES

X = torch.randn(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        y = self.fc2(F.gelu(self.fc1(x)))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.tanh()


class ByValue(Net):
    """No graph can stand for its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Act(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class TwoLayers(Pattern):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return call_module("fc2", F.gelu(call_module("fc1", x)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inputs", [None, (X,), {"x": X}])
@pytest.mark.parametrize(
    ("path", "wanted", "count"),
    [
        ("", r"fc\d", 4),
        ("", r"blocks\.\d", 2),
        ("", F.gelu, 2),
        ("", lambda x: F.gelu(x), 2),
        ("", TwoLayers(), 2),
        ("blocks.1", "fc1", 1),
        ("blocks.1", lambda x: F.gelu(x), 1),
        ("blocks.0.fc1", lambda x, w, b: F.linear(x, w, b), 1),
    ],
)
def test_what_is_not_traced_is_traced(path: str, wanted: Any, count: int, inputs: Any) -> None:
    if wanted is F.gelu:

        def wanted(node: Any) -> bool:
            return node.target is F.gelu

    model = Net()
    plain = copy.deepcopy(model)
    sch = create_schedule(model, example_inputs=inputs)
    part = sch[path] if path else sch
    found = part.find_node(wanted) if getattr(wanted, "__name__", "") == "wanted" else part.find(wanted)
    assert len(found) == count
    assert [step.name for step in sch.journal] == ["trace"]
    for x in (X, torch.randn(5, 4)):
        torch.testing.assert_close(sch.mod(x), plain(x))
    assert len(part.find(wanted) if isinstance(wanted, (str, Pattern)) else [0] * count) == count
    assert len(sch.journal) == 1
    sch.undo()
    assert sch.mod is model
    assert type(model.blocks[0]) is Block


def test_without_example_inputs_what_the_fx_tracer_cannot_do_is_one_sentence() -> None:
    sch = create_schedule(ByValue())
    with pytest.raises(TraceError, match=r"^tracer 'fx' cannot trace ByValue: .*; give example_inputs and no tracer[^.]*$"):
        sch.find("fc1")
    assert len(sch.journal) == 0
    assert len(sch["blocks.0"].find("fc1")) == 1


def test_what_cannot_be_a_graph_stays_whole_and_the_rest_is_searched() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = ByValue(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x))

    model = Outer()
    sch = create_schedule(model, example_inputs=(X.abs(),))
    assert [str(node.target) for _, node in sch.find("head|inner")] == ["inner", "head"]
    torch.testing.assert_close(sch.mod(-X.abs()), model(-X.abs()))


def test_a_model_of_which_a_part_is_traced() -> None:
    sch = create_schedule(Net(), example_inputs=(X,))
    sch["blocks.0"].trace()
    assert len(sch.find("fc1")) == 1
    assert len(sch.find(r"blocks\.\d")) == 2  # these are called where nothing was traced before
    assert len(sch.find("fc1")) == 2


def test_nothing_found_is_said(capsys: Any) -> None:
    sch = create_schedule(Net(), example_inputs=(X,))
    assert sch.find("fc3") == []
    assert sch["blocks.0"].find(lambda x: x.cos()) == []
    said = capsys.readouterr().err
    assert "find(''): 'fc3' matches nothing in 3 graphs" in said
    assert "find('blocks.0'): <lambda>" in said


@pytest.mark.parametrize("pattern", [lambda x: F.gelu(x), TwoLayers(), r"blocks\.1"])
def test_replace_takes_a_pattern(pattern: Any) -> None:
    model = Net()
    sch = create_schedule(model, example_inputs=(X,))
    sch.replace(nn.Tanh(), pattern)
    expected = X
    for number, block in enumerate(model.blocks):
        if isinstance(pattern, str):
            expected = block(expected) if number == 0 else expected.tanh()
        else:
            inner = expected.tanh() if isinstance(pattern, TwoLayers) else block.fc2(block.fc1(expected).tanh())
            expected = expected + inner
    torch.testing.assert_close(sch.mod(X), expected.tanh())
    assert [step.name for step in sch.journal] == ["replace"]
    sch.undo()
    assert type(sch.mod) is Net
    with pytest.raises(ScheduleError, match=r"replace\(''\): <lambda> matches nothing"):
        sch.replace(nn.Tanh(), lambda x: x.cos().cos())
    assert type(sch.mod) is Net


def test_fuse_and_checkpoint_take_patterns() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    sch = create_schedule(model, example_inputs=(X,))
    sch.fuse(lambda x: F.gelu(x), compiler=None)
    sch.checkpoint(lambda x: x.tanh())
    for x in (X, torch.randn(3, 4)):
        torch.testing.assert_close(sch.mod(x), plain(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt", "vit"])
def test_attentions_of_transformers(name: str) -> None:
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    expected = model(**batch)
    sch = create_schedule(model, example_inputs=batch)
    found = sch.find(r".*(attn|attention).*")
    assert found
    loss = getattr(expected, "loss", None)
    torch.testing.assert_close(sch.mod(**batch).loss, loss)


class Activated(nn.Module):
    """Its activation is a module, so no graph of a module of its own has the whole pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(4)), Act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x * self.scale)


def over_two_modules(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.gelu(x * scale)


def test_a_pattern_that_goes_from_one_module_into_another(capsys: Any) -> None:
    sch = create_schedule(Activated(), example_inputs=(X,))
    assert len(sch.find(over_two_modules)) == 1
    assert capsys.readouterr().err == ""
    sch = create_schedule(Activated(), example_inputs=(X,))
    sch.trace()
    assert sch.find(over_two_modules) == []
    assert "trace(flatten=True) makes one of all, which has 1" in capsys.readouterr().err


def test_in_a_list_of_modules() -> None:
    sch = create_schedule(Net(), example_inputs=(X,))
    assert len(sch["blocks"].find(lambda x: F.gelu(x))) == 2
    assert len(sch["blocks"].find("fc1")) == 2
    expected = sch.mod(X)
    sch["blocks"].replace(Act(), lambda x: F.gelu(x))
    torch.testing.assert_close(sch.mod(X), expected)


@pytest.mark.parametrize("wanted", ["(", 3, None, lambda x: x, [1]])
def test_bad_input_leaves_the_model_as_it_was(wanted: Any) -> None:
    sch = create_schedule(Net(), example_inputs=(X,))
    with pytest.raises((ScheduleError, TypeError), match="find"):
        sch.find(wanted)
    assert len(sch.journal) == 0


@pytest.mark.parametrize("wanted", ["nothing", lambda x: torch.special.expit(x) * 3])
def test_what_matches_nothing_cannot_be_replaced(wanted: Any) -> None:
    sch = create_schedule(Net(), example_inputs=(X,))
    with pytest.raises(ScheduleError, match="matches nothing; print"):
        sch.replace(Act(), wanted)
