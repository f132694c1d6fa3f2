"""``cut_pipeline_stage`` as a step of a schedule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import BuildError, Schedule, ScheduleError, TraceError, build_program
from slapo_tracing.nodes import wrap_forward

from .stage_comparison import cut
from .toy_models import Counts, Skips, Stateful, TwiceNormed

X = {"x": torch.randn(4, 8), "labels": torch.randn(4, 1)}


def test_a_cut_is_journaled_and_undone() -> None:
    schedule = cut(Skips(), X, "a", "c")
    assert str(schedule.journal).splitlines() == ["sch['a'].cut_pipeline_stage()", "sch['c'].cut_pipeline_stage()"]
    schedule.undo()
    assert [stage.paths for stage in build_program(schedule).stages] == [("a",), ("b", "c", "d", "head")]


def test_a_saved_cut_is_taken_again(tmp_path: Path) -> None:
    from slapo_core import load_schedule

    first = cut(Skips(), X, "b")
    first.save(tmp_path / "schedule.json")
    second = load_schedule(Skips(), tmp_path / "schedule.json", example_inputs=X, plugins=first._root.registry)
    assert len(build_program(second).stages) == 2


def test_no_cut_is_one_stage() -> None:
    schedule = cut(Skips(), X)
    assert len(build_program(schedule).stages) == 1


def test_the_same_place_twice() -> None:
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('a'\): a stage ends after this module already"):
        cut(Skips(), X, "a", "a")


def cut_before(model: nn.Module, inputs: Any, *paths: str) -> Schedule:
    """A schedule with stages that begin with ``paths``."""
    schedule = cut(model, inputs)
    for path in paths:
        schedule[path].cut_pipeline_stage(where="before")
    return schedule


def test_a_stage_begins_with_a_module() -> None:
    program = build_program(cut_before(Skips(), X, "d", "b"))
    assert [stage.paths for stage in program.stages] == [("a",), ("b", "c"), ("d", "head")]


class Residual(nn.Module):
    """Adds between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Pair(), Pair()
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a(x)
        return self.head(self.b(x)).pow(2).mean()


class Pair(nn.Module):
    """Does something before its first module and after its last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * 2)).tanh()


@pytest.mark.parametrize(
    ("before", "after", "stages"),
    [
        (["b"], [], [("a",), ("b", "head")]),
        (["b.second"], [], [("a", "b.first"), ("b.second", "head")]),
        (["b"], ["b.first"], [("a",), ("b.first",), ("b.second", "head")]),
        (["b"], ["b"], [("a",), ("b",), ("head",)]),
        (["a.second", "head"], ["a"], [("a.first",), ("a.second",), ("b",), ("head",)]),
    ],
)
def test_stages_that_begin_with_modules_are_the_model(before: list[str], after: list[str], stages: list[Any]) -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    schedule = cut(model, {"x": x}, *after)
    for path in before:
        schedule[path].cut_pipeline_stage("before")
    program = build_program(schedule)
    assert [stage.paths for stage in program.stages] == stages
    found, expected = program(x=x), plain(x)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_what_a_module_does_first_is_in_the_stage_that_begins_with_it() -> None:
    schedule = cut(Residual(), {"x": torch.randn(4, 8)}, "b.first")
    schedule["b"].cut_pipeline_stage(where="before")
    first, second, _ = build_program(schedule).stages
    names = [[node.name for node in stage.module.graph.nodes] for stage in (first, second)]  # type: ignore[union-attr]
    assert names[0] == ["x", "a", "add", "output"]
    assert names[1] == ["add", "mul", "b_first", "output"]


def test_a_module_that_runs_twice_begins_its_stage_the_first_time() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    program = build_program(cut_before(model, {"input": torch.randn(1, 2)}, "3"))
    assert [stage.paths for stage in program.stages] == [("0",), ("1", "2")]


def test_a_cut_before_is_journaled_undone_and_taken_again(tmp_path: Path) -> None:
    from slapo_core import load_schedule

    schedule = cut_before(Skips(), X, "b")
    schedule["b"].cut_pipeline_stage()
    lines = ["sch['b'].cut_pipeline_stage(where='before')", "sch['b'].cut_pipeline_stage()"]
    assert str(schedule.journal).splitlines() == lines
    for name in ("schedule.json", "schedule.py"):
        schedule.save(tmp_path / name)
        again = load_schedule(Skips(), tmp_path / name, example_inputs=X, plugins=schedule.registry)
        assert [stage.paths for stage in build_program(again).stages] == [("a",), ("b",), ("c", "d", "head")]
    schedule.undo()
    assert len(build_program(schedule).stages) == 2
    schedule.undo()
    assert len(build_program(schedule).stages) == 1
    schedule["b"].cut_pipeline_stage("before")
    assert [stage.paths for stage in build_program(schedule).stages] == [("a",), ("b", "c", "d", "head")]


def test_the_same_place_twice_before() -> None:
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('b'\): a stage begins with this module already"):
        cut_before(Skips(), X, "b", "b")


def test_before_the_first_module() -> None:
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('a'\): nothing runs before it; remove this cut"):
        build_program(cut_before(Skips(), X, "a", "c"))


def test_the_end_of_one_module_and_the_begin_of_the_next() -> None:
    schedule = cut_before(Skips(), X, "c")
    schedule["b"].cut_pipeline_stage()
    with pytest.raises(ScheduleError, match="nothing runs between it and"):
        build_program(schedule)


def test_before_a_module_that_does_not_run() -> None:
    model = Skips()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('spare'\): the model does not run this module"):
        build_program(cut_before(model, X, "spare"))


def test_before_the_whole_model() -> None:
    with pytest.raises(ScheduleError, match="a stage begins with the whole model; cut before a module inside it"):
        cut(Skips(), X).cut_pipeline_stage(where="before")


def test_neither_before_nor_after() -> None:
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('a'\): where is 'behind'; give 'after' or 'before'"):
        cut(Skips(), X)["a"].cut_pipeline_stage(where="behind")


def test_the_whole_model() -> None:
    with pytest.raises(ScheduleError, match="nothing comes after the whole model"):
        cut(Skips(), X).cut_pipeline_stage()


def test_inside_a_wrapped_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    wrap_forward(model[0], lambda call, *args: call(*args))
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('0.0'\): it lies inside '0', which is wrapped or has hooks"):
        cut(model, {"input": torch.randn(1, 2)}, "0.0")


def test_a_module_wrapped_around_a_cut() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    schedule = cut(model, {"input": torch.randn(1, 2)}, "0.0")
    wrap_forward(model[0], lambda call, *args: call(*args))
    with pytest.raises(BuildError, match=r"the model is cut at '0.0', inside '0', which was wrapped"):
        build_program(schedule)


def test_after_the_last_module() -> None:
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('head'\): nothing runs after it; remove this cut"):
        build_program(cut(Skips(), X, "head"))


def test_a_module_that_does_not_run() -> None:
    model = Skips()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('spare'\): the model does not run this module"):
        build_program(cut(model, X, "spare"))


def test_two_cuts_at_one_place() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(ScheduleError, match="nothing runs between it and"):
        build_program(cut(model, {"input": torch.randn(1, 2)}, "0", "0.0"))


def test_an_object_that_both_stages_change() -> None:
    with pytest.raises(TraceError, match=r"a Cache is used by stages 0 and 1, but only tensors can cross.*toy_models.py:\d+"):
        build_program(cut(Stateful(), {"x": torch.randn(2, 8)}, "a"))


def test_running_statistics_of_two_stages() -> None:
    with pytest.raises(TraceError, match=r"'norm\.\w+' is changed in stages 0 and 1 and used in stages 0 and 1"):
        build_program(cut(TwiceNormed(), {"x": torch.randn(4, 8)}, "b"))


class Counter(nn.Module):
    """Counts its calls, in a buffer, a number or an object."""

    def __init__(self, what: str, shared: dict[str, int]) -> None:
        super().__init__()
        self.linear, self.what, self.number, self.shared = nn.Linear(8, 8), what, 0, shared
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "buffer":
            self.calls.add_(1)
        elif self.what == "assignment":
            self.calls = self.calls + 1
        elif self.what == "number":
            self.number += 1
        elif self.what == "object":
            self.shared["n"] += 1
        return self.linear(x) * (self.calls + self.number + self.shared["n"] + 1)


class Counted(nn.Module):
    """A counter before and after a cut."""

    def __init__(self, what: str, again: str) -> None:
        super().__init__()
        shared = {"n": 0}
        self.a, self.b = Counter(what, shared), nn.Linear(8, 8)
        self.c = Counter("nothing", shared) if again == "share" else None
        self.d = nn.Linear(8, 8)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        if self.again == "read":
            x = x * self.a.calls
        last = {"call": self.a, "share": self.c}.get(self.again, self.d)
        return last(x).pow(2).mean()


@pytest.mark.parametrize(
    ("what", "again"),
    [
        *((what, "call") for what in ("buffer", "assignment", "number", "object")),
        ("buffer", "read"),
        ("object", "share"),
    ],
)
def test_what_a_whole_module_changes_on_itself_has_one_stage(what: str, again: str) -> None:
    with pytest.raises(TraceError, match=r"'a.(calls|number|shared)' is changed in stages? .* and used in stages 0 and 1"):
        build_program(cut(Counted(what, again), {"x": torch.randn(4, 8)}, "b"))


@pytest.mark.parametrize("what", ["buffer", "assignment", "number", "object"])
def test_what_a_whole_module_changes_on_itself_in_one_stage(what: str) -> None:
    model = Counted(what, "nothing")
    x, plain = torch.randn(4, 8), copy.deepcopy(model)
    program = build_program(cut(model, {"x": x}, "b"))
    for _ in range(2):
        torch.testing.assert_close(program(x=x), plain(x))


class Tally(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(8, 8), 0, {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen["calls"] += 1
        return self.linear(x)


class Follower(nn.Module):
    """Reads a number of a module that is not its child."""

    def __init__(self, other: Tally, name: str) -> None:
        super().__init__()
        self.linear, self.others, self.name = nn.Linear(8, 8), [other], name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = getattr(self.others[0], self.name)
        return self.linear(x) * (number["calls"] if isinstance(number, dict) else number)


@pytest.mark.parametrize("name", ["calls", "seen"])
def test_a_number_that_another_stage_changes(name: str) -> None:
    tally = Tally()
    model = nn.Sequential(tally, Follower(tally, name), nn.Linear(8, 1))
    with pytest.raises(TraceError, match=f"'0.{name}' is changed in .* and used in stages 0 and 1, which have a copy each"):
        build_program(cut(model, {"input": torch.randn(4, 8)}, "0"))
    alike = copy.deepcopy(model)
    program = build_program(cut(model, {"input": torch.randn(4, 8)}, "1"))
    for _ in range(2):
        x = torch.randn(4, 8)
        torch.testing.assert_close(program(input=x), alike(x))


@pytest.mark.parametrize(("changes", "reads"), [((0, 2), ()), ((0, 2), (2,)), ((2,), (0,)), ((0, 1, 2), (0, 1, 2))])
def test_a_buffer_that_would_drift_apart(changes: tuple[int, ...], reads: tuple[int, ...]) -> None:
    with pytest.raises(TraceError, match="'calls' is changed in stages? .* and used in stages 0 and 1"):
        build_program(cut(Counts(changes, reads), {"x": torch.randn(4, 8)}, "a"))


def test_a_buffer_that_only_training_changes_is_read_in_its_stage() -> None:
    x = torch.randn(4, 8)
    program = build_program(cut(Counts((0,), (2,), in_eval=False), {"x": x}, "a"))
    assert program.replan is not None
    with pytest.raises(TraceError, match="'calls' is changed in stage 0 and used in stages 0 and 1"):
        program.replan(False, {"x": x})
    program.replan(True, {"x": x[:2]})


def test_a_stage_says_what_it_was_made_for() -> None:
    program = build_program(cut(Skips(), X, "b"))
    with pytest.raises(TraceError, match=r"stage 0 was made for other inputs.* x is a tensor \[2, 8\]"):
        program.stages[0].module(x=torch.randn(2, 8))
    program.stages[0].module.eval()
    with pytest.raises(TraceError, match="it was traced in train mode"):
        program.stages[0].module(x=X["x"])
