"""Marks in a model's own code, where stages end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import pipe_split as torch_pipe_split
from torch.nn import functional as F

from slapo_core import Program, ScheduleError, build_program, load_schedule
from slapo_pipeline.analysis import module_stages
from slapo_pipeline.tracing import pipe_split
from slapo_tracing.nodes import wrap_forward

from ..stage_comparison import assert_same, cut, loss_of

WIDTH = 8
X = {"x": torch.randn(4, WIDTH)}


class Marked(nn.Module):
    """Marks between its modules and between products with its own parameters."""

    def __init__(self, split: Any = pipe_split) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), Inner(split)
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.split = [split]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x)) + x
        self.split[0]()
        x = self.b(x) @ self.first
        self.split[0]()
        return (x @ self.second).pow(2).mean()


class Inner(nn.Module):
    """Has a mark of its own."""

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.up, self.down, self.split = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), [split]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        self.split[0]()
        return x + self.down(y)


def assert_same_at_marks(model: nn.Module, inputs: dict[str, Any], *cuts: str) -> Program:
    """Outputs and gradients of a program cut at all marks, and after ``cuts``, equal the model's."""
    before = copy.deepcopy(model)
    program = build_program(cut(model, inputs, *cuts).cut_at_marks())
    expected, found = before(**inputs), program(**inputs)
    assert_same(found, expected, "outputs")
    loss_of(expected).backward()
    loss_of(found).backward()
    grads = ({name: parameter.grad for name, parameter in each.named_parameters()} for each in (model, before))
    assert_same(*grads, "grad")
    return program


@pytest.mark.parametrize("split", [pipe_split, torch_pipe_split])
def test_a_program_cut_at_its_marks_is_the_model(split: Any) -> None:
    program = assert_same_at_marks(Marked(split), X)
    assert [stage.paths for stage in program.stages] == [("a",), ("b.up",), ("b.down",), ()]
    assert [sorted(dict(stage.module.named_parameters(recurse=False))) for stage in program.stages] == [
        [],
        [],
        ["first"],
        ["second"],
    ]


def test_marks_and_cuts_go_together() -> None:
    program = assert_same_at_marks(Marked(), X, "a")
    assert [stage.paths for stage in program.stages] == [("a",), (), ("b.up",), ("b.down",), ()]


def test_marks_do_nothing_when_the_model_runs() -> None:
    model = Marked()
    assert pipe_split() is None
    torch.testing.assert_close(model(**X), Marked.forward(model, **X))
    no_marks = copy.deepcopy(model)
    no_marks.split = no_marks.b.split = [lambda: None]
    assert torch.equal(model(**X), no_marks(**X))


def test_marks_that_nobody_cuts_at_stay_whole() -> None:
    program = build_program(cut(Marked(), X, "a"))
    assert [stage.paths for stage in program.stages] == [("a",), ("b",)]
    assert not any("mark" in node.name for node in program.stages[1].module.graph.nodes)  # type: ignore[union-attr]
    assert torch.ops.pippy._pipe_split() is None  # torch's own is back in place


def test_one_module_s_marks() -> None:
    schedule = cut(Marked(), X)
    schedule["b"].cut_at_marks()
    assert module_stages(schedule) == {"": (0, 1), "a": (0,), "b": (0, 1), "b.up": (0,), "b.down": (1,)}


def test_one_of_several_marks() -> None:
    schedule = cut(Marked(), X).cut_at_marks(1)
    first, last = build_program(schedule).stages
    assert (first.paths, last.paths) == (("a", "b"), ())


class Repeats(nn.Module):
    """Calls one marked module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(pipe_split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x)).mean()


def test_a_module_that_runs_twice_has_twice_the_marks() -> None:
    program = assert_same_at_marks(Repeats(), X)
    assert [stage.paths for stage in program.stages] == [("inner.up",), ("inner.down", "inner.up"), ("inner.down",)]
    assert [(tie.names, tie.stages) for tie in program.ties if "up.weight" in tie.names[0]] == [(("inner.up.weight",), (0, 1))]


def test_marks_are_journaled_undone_and_taken_again(tmp_path: Path) -> None:
    schedule = cut(Marked(), X).cut_at_marks()
    assert str(schedule.journal).splitlines() == [
        "sch.cut_at_marks()",
        "#   sch.cut_at_marks(0, 1)",
        "#   sch['b'].cut_at_marks(0)",
    ]
    for name in ("schedule.json", "schedule.py"):
        schedule.save(tmp_path / name)
        again = load_schedule(Marked(), tmp_path / name, example_inputs=X, plugins=schedule.registry)
        assert len(build_program(again).stages) == 4
    schedule.undo()
    assert len(build_program(schedule).stages) == 1
    assert len(build_program(schedule.cut_at_marks()).stages) == 4


def test_a_traced_model_keeps_its_marks() -> None:
    schedule = cut(Marked(), X)
    schedule.trace(flatten=True)
    assert len(build_program(schedule.cut_at_marks()).stages) == 4


class Loss(nn.Module):
    """A model with its loss: takes inputs and targets, gives a number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), targets)


def test_a_model_that_computes_its_loss() -> None:
    model = Loss(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)))
    batch = {**X, "targets": torch.randint(0, 3, (4,))}
    plain = copy.deepcopy(model)
    first, last = (program := build_program(cut(model, batch, "model.1"))).stages
    assert (first.batch_inputs, last.batch_inputs) == (("x",), ("targets",))
    found, expected = program(**batch), plain(**batch)
    found.backward()
    expected.backward()
    assert_same(found, expected, "loss")
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)


def test_no_marks() -> None:
    with pytest.raises(
        ScheduleError, match=r"cut_at_marks\(''\): the forward runs into no mark; call slapo.pipeline.pipe_split"
    ):
        cut(nn.Sequential(nn.Linear(2, 2)), {"input": torch.randn(1, 2)}).cut_at_marks()
    with pytest.raises(ScheduleError, match=r"cut_at_marks\('a'\): the forward runs into no mark"):
        cut(Marked(), X)["a"].cut_at_marks()


def test_a_mark_twice() -> None:
    with pytest.raises(ScheduleError, match=r"a stage ends at mark 0 of this module's forward already"):
        cut(Marked(), X).cut_at_marks(0).cut_at_marks()
    with pytest.raises(ScheduleError, match=r"a stage ends at mark 1 of this module's forward already"):
        cut(Marked(), X).cut_at_marks(1, 1)


@pytest.mark.parametrize("number", [-1, True, "first"])
def test_no_number_of_a_mark(number: Any) -> None:
    with pytest.raises(
        ScheduleError, match=rf"{number!r} is not a mark; the first one that this module's forward runs into is 0"
    ):
        cut(Marked(), X).cut_at_marks(number)


def test_a_mark_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match=r"runs into 2 marks of this module's forward on the .*, so there is no mark 2"):
        build_program(cut(Marked(), X).cut_at_marks(2))
    schedule = cut(Marked(), X)
    schedule["a"].cut_at_marks(0)
    with pytest.raises(ScheduleError, match=r"cut_at_marks\('a'\): the model runs into no mark of this module's forward"):
        build_program(schedule)


class ByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipe_split()
        return x if x.sum() > 0 else -x


def test_no_example_inputs() -> None:
    found, expected = cut(Marked(), None), cut(Marked(), X)
    found.cut_at_marks()
    expected.cut_at_marks()
    assert str(found.journal) == str(expected.journal)
    with pytest.raises(ScheduleError, match="marks are found by running the model; give create_schedule example_inputs="):
        cut(ByValue(), None).cut_at_marks()


def test_a_mark_in_a_wrapped_module() -> None:
    model = Marked()
    wrap_forward(model.b, lambda call, *args: call(*args))
    with pytest.raises(ScheduleError, match=r"cut_at_marks\('b'\): its forward is wrapped or has hooks and runs as one piece"):
        cut(model, X).cut_at_marks()


def test_a_mark_in_a_module_wrapped_later() -> None:
    model = Marked()
    schedule = cut(model, X).cut_at_marks()
    wrap_forward(model.b, lambda call, *args: call(*args))
    with pytest.raises(ScheduleError, match=r"cut_at_marks\('b'\): the model runs into no mark of this module's forward"):
        build_program(schedule)


class Early(nn.Module):
    """Has a mark before everything, or two in a row, or one after everything."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.b, self.where = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipe_split() if self.where == "before" else None
        x = self.a(x)
        pipe_split()
        pipe_split() if self.where == "between" else None
        x = self.b(x)
        pipe_split() if self.where == "after" else None
        return x


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_mark_with_nothing_to_run(where: str) -> None:
    with pytest.raises(ScheduleError, match=rf"cut_at_marks\(''\): nothing runs {where} it"):
        build_program(cut(Early(where), X).cut_at_marks())
