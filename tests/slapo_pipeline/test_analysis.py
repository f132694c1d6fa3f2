"""The analysis of a partition is what its stages do."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import BuildError, Program, ScheduleError, Stage, UnknownNameError, build_program
from slapo_pipeline.analysis import (
    analyze_pipeline_module,
    module_stages,
)
from slapo_pipeline.partition import analyze_tie_weights
from slapo_pipeline.propagation import build_pipeline_model, generate_pipeline_partition

from .stage_comparison import cut
from .toy_models import WIDTH, InPlace, Regions, Skips, Structures

X = {"x": torch.randn(4, WIDTH), "labels": torch.randn(4, 1)}


class Tied(nn.Module):
    """The first and the last stage use one weight; a table is made from the shape alone; one module never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.embedding, self.spare = nn.Embedding(16, WIDTH), nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        table = self.table(x)
        for block in self.blocks:
            x = block(x * table)
        return self.head(x).pow(2).mean()


class Table(nn.Module):
    """Asks a hidden state for its shape only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[-1], device=x.device) / WIDTH


IDS = {"ids": torch.randint(0, 16, (2, 3))}


def test_every_module_gets_the_stages_that_run_it() -> None:
    found = module_stages(cut(Tied(), IDS, "blocks.0", "blocks.1.0"))
    assert found["embedding"] == found["blocks.0"] == found["blocks.0.1"] == (0,)
    assert (found["blocks.1.0"], found["blocks.1.1"], found["head"]) == ((1,), (2,), (2,))
    assert (found[""], found["blocks"], found["blocks.1"]) == ((0, 1, 2), (0, 1, 2), (1, 2))
    assert found["table"] == (0, 1, 2)  # each stage makes its own
    assert "spare" not in found


def test_a_shared_module_has_the_stages_of_all_its_names() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared)
    assert module_stages(cut(model, {"input": X["x"]}, "1")) == {"": (0, 1), "0": (0, 1), "1": (0,), "2": (0, 1)}


def test_without_cuts_all_is_one_stage() -> None:
    model = Tied()
    schedule = cut(model, IDS)
    assert module_stages(schedule) == {path: (0,) for path, _ in model.named_modules()}
    found = analyze_pipeline_module(schedule)
    assert (found.values, found.received, found.batch_inputs) == ((), {0: ()}, {0: ()})


def test_nothing_is_changed() -> None:
    model = Tied()
    before, schedule = copy.deepcopy(model), cut(model, IDS, "blocks.0")
    module_stages(schedule)
    assert len(build_program(schedule["head"]).stages) == 2
    assert str(model) == str(before)
    assert [*model.state_dict()] == [*before.state_dict()]
    schedule.undo()
    assert len(build_program(schedule).stages) == 1


def test_the_partition_is_the_model() -> None:
    model = Tied()
    expected = copy.deepcopy(model)(**IDS)
    program = build_program(cut(model, IDS, "blocks.0", "blocks.1"))
    torch.testing.assert_close(program(**IDS), expected)


def test_arguments_and_results_of_the_stages() -> None:
    found = analyze_pipeline_module(cut(Skips(), X, "a", "b"))
    assert found.stage_names == ("stage_0", "stage_1", "stage_2")
    assert found.received == {0: (), 1: ("a",), 2: ("a", "b")}
    assert found.batch_inputs == {0: ("x",), 1: (), 2: ("labels",)}
    assert found.arguments == {0: ("x",), 1: ("a",), 2: ("a", "b", "labels")}
    assert found.results == {0: ("a",), 1: ("a", "b"), 2: ("loss", "out")}


def test_a_skip_lives_until_its_last_use() -> None:
    found = analyze_pipeline_module(cut(Skips(), X, "a", "b", "c"))
    skip, *_ = found.values
    assert (skip.name, skip.made_by, skip.passed_by, skip.used_by) == ("a", 0, (2,), (1, 3))
    assert (skip.shape, skip.nbytes, skip.received_by) == ((4, WIDTH), 4 * WIDTH * 4, (1, 2, 3))
    assert found.forward == {0: ("a",), 1: ("a", "b"), 2: ("a", "b", "c"), 3: ("a", "c")}
    assert found.backward == found.forward
    assert [found.bytes_sent(stage) for stage in range(4)] == [128, 256, 256, 0]


def test_what_has_no_gradient_is_alive_in_the_forward_only() -> None:
    found = analyze_pipeline_module(cut(Regions(), {"x": torch.randn(4, WIDTH)}, "norm"))
    assert {value.name: value.requires_grad for value in found.values} == {"sigmoid": False, "norm": True}
    assert set(found.forward[0]) == set(found.forward[1]) == {"sigmoid", "norm"}
    assert found.backward == {0: ("norm",), 1: ("norm",)}


@pytest.mark.parametrize(
    ("model", "inputs", "places"),
    [
        (Skips, X, ("a", "b", "c")),
        (Regions, {"x": torch.randn(4, WIDTH)}, ("a", "b")),
        (InPlace, {"x": torch.randn(4, WIDTH)}, ("a", "b")),
        (Structures, {"x": torch.randn(4, WIDTH), "mask": torch.ones(4, WIDTH)}, ("opening", "a", "first")),
    ],
)
def test_the_stages_do_what_the_analysis_says(model: type[nn.Module], inputs: dict[str, Any], places: tuple[str, ...]) -> None:
    program = build_program(cut(model(), inputs, *places))
    found = analyze_pipeline_module(program)
    assert found.values
    values, sent = {value.name: value for value in found.values}, {}
    for stage in program.stages:
        leaves = {name: sent[name].detach().requires_grad_(sent[name].requires_grad) for name in found.received[stage.index]}
        result = stage.module(*leaves.values(), **{name: inputs[name] for name in found.batch_inputs[stage.index]})
        if stage is program.stages[-1]:
            break
        sent = dict(zip(found.results[stage.index], result, strict=True))
        assert {name: (tensor.shape, tensor.requires_grad) for name, tensor in sent.items()} == {
            name: (value.shape, value.requires_grad) for name, value in values.items() if stage.index + 1 in value.received_by
        }
        assert sum(tensor.nbytes for tensor in sent.values()) == found.bytes_sent(stage.index)
        assert {name for name in leaves if sent.get(name) is leaves[name]} >= {
            name for name, value in values.items() if stage.index in value.passed_by
        }


class Turned(nn.Module):
    """Sends a value that is not contiguous past a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.a(x).t()
        return self.d(self.c(self.b(x))) @ turned


def test_a_value_that_is_laid_out_and_sent_on_is_passed() -> None:
    found = analyze_pipeline_module(cut(Turned(), {"x": torch.randn(4, 4)}, "b", "c"))
    turned = next(value for value in found.values if value.name == "t")
    assert (turned.made_by, turned.passed_by, turned.used_by) == (0, (1,), (2,))


def test_an_analysis_is_not_to_be_written_to() -> None:
    found = analyze_pipeline_module(cut(Skips(), X, "a"))
    with pytest.raises(FrozenInstanceError):
        found.stage_names = ()  # type: ignore[misc]


def test_ties_of_a_program() -> None:
    model = Tied()
    program = build_program(cut(model, IDS, "blocks.1"))
    stages = nn.Sequential(*(stage.module for stage in program.stages))
    assert analyze_tie_weights(stages, True) == {model.head.weight: {("embedding.weight", 0), ("head.weight", 1)}}
    (tie,) = program.ties
    assert (tie.names, tie.stages) == (("embedding.weight", "head.weight"), (0, 1))


def test_a_stage_of_any_kind_uses_what_it_gets() -> None:
    program = build_program(cut(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {"input": torch.randn(1, 2)}, "0"))
    first, last = program.stages
    plain = Stage(1, nn.Tanh(), inputs=last.inputs)
    found = analyze_pipeline_module(Program(program.module, (first, plain)))
    assert [value.used_by for value in found.values] == [(1,)]
    assert found.results[1] == ("output",)


def test_build_gives_an_engine() -> None:
    model = Tied()
    plain, engine = build_pipeline_model(cut(model, IDS, "blocks.0"), target=None)
    assert plain is model
    assert engine is None


def test_an_unknown_engine() -> None:
    with pytest.raises(UnknownNameError, match="no dialect 'nowhere'"):
        build_pipeline_model(cut(Tied(), IDS, "blocks.0"), "nowhere")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (generate_pipeline_partition, "cannot partition a Linear; give what create_schedule returned"),
        (module_stages, "cannot partition a Linear; give what create_schedule returned"),
        (analyze_pipeline_module, "cannot analyze a Linear; give a partitioned module, a Program or a schedule"),
    ],
)
def test_neither_schedule_nor_program(call: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        call(nn.Linear(2, 2))


def test_a_cut_that_leaves_nothing_to_run() -> None:
    with pytest.raises(ScheduleError, match="nothing runs after it"):
        module_stages(cut(Tied(), IDS, "head"))
