"""``cut_pipeline_stage`` as a step of a schedule."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from slapo_core.build import build_program
from slapo_core.errors import BuildError, ScheduleError, TraceError
from slapo_core.wrapping import wrap_forward

from .staged import cut
from .toys import Counts, Skips, Stateful, TwiceNormed

X = {"x": torch.randn(4, 8), "labels": torch.randn(4, 1)}


def test_a_cut_is_journaled_and_undone() -> None:
    schedule = cut(Skips(), X, "a", "c")
    assert str(schedule.journal).splitlines() == ["sch['a'].cut_pipeline_stage()", "sch['c'].cut_pipeline_stage()"]
    schedule.undo()
    assert [stage.paths for stage in build_program(schedule).stages] == [("a",), ("b", "c", "d", "head")]


def test_a_saved_cut_is_taken_again(tmp_path: Path) -> None:
    from slapo_core.replay import load_schedule

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
    with pytest.raises(BuildError, match=r"a stage ends after '0.0', inside '0', which was wrapped"):
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


def test_no_example_inputs() -> None:
    with pytest.raises(BuildError, match="a model is cut by tracing it; give create_schedule example_inputs="):
        build_program(cut(Skips(), None, "a"))


def test_an_object_that_both_stages_change() -> None:
    with pytest.raises(TraceError, match=r"a Cache is used by stages 0 and 1, but only tensors can cross.*toys.py:\d+"):
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
