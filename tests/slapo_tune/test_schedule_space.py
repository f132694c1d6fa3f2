"""Spaces of schedules: symbols, schedule files with a space, and the tree of tried configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from slapo_core import ScheduleError, load_schedule
from slapo_tune import ScheduleSpace, TuneError, schedule_values
from slapo_tune.schedule_space.exploration import ExhaustedError, Exploration, ReplayedSpace, enumerate_space
from slapo_tune.schedule_space.schedule_file import VARIABLE

FILE = """
def space(space):
    if space.choice("kernel", ["eager", "flash"]) == "flash":
        space.int("block", 16, 64, 16, default=32)

def schedule(sch, space):
    for index in range(space.int("replaced", 0, 2)):
        sch[str(index)].replace(slapo_core.make(torch.nn.Tanh))
    sch.annotate("mark", "kernel", space["kernel"])

import slapo_core, torch
"""


def conditional(space: ScheduleSpace) -> None:
    tp = space.choice("tp", [1, 2])
    space.int("microbatches", 1, 3 if tp == 1 else 2)
    if tp == 2:
        space.choice("sequence", [False, True])


def test_a_space_without_values_has_the_defaults() -> None:
    space = ScheduleSpace()
    assert space.int("depth", 2, 8, 2) == 2
    assert space.int("width", 1, 4, default=3) == 3
    assert space.choice("kernel", ["flash", "eager", "flash"]) == "flash"
    assert space.int("depth", 2, 8, 2) == 2
    assert dict(space) == {"depth": 2, "width": 3, "kernel": "flash"}
    assert space.definitions["kernel"].candidates == ("flash", "eager")
    assert space.get("missing", 5) == 5
    assert "missing" not in space


def test_a_value_of_the_run_is_taken() -> None:
    space = ScheduleSpace({"depth": 4, "on": True})
    assert space.int("depth", 0, 8) == 4
    assert space.choice("on", [1, True]) is True


@pytest.mark.parametrize(
    ("declare", "sentence"),
    [
        (lambda s: s.int("x", 3, 1), r"space.int\('x'\): 3 to 1 by 1 is no range"),
        (lambda s: s.int("x", 0, 1.5), r"space.int\('x'\): 0 to 1.5 by 1 is no range"),
        (lambda s: s.int("x", 0, 10**6), "symbol 'x': it has 1000001 candidates; give 1 to 10000"),
        (lambda s: s.choice("x", []), "symbol 'x': it has 0 candidates"),
        (lambda s: s.choice("x", "eager"), r"space.choice\('x'\): the candidates are 'eager', one value; give a list"),
        (lambda s: s.choice("x", [[1]]), r"space.choice\('x'\): \[1\] cannot be stored"),
        (lambda s: s.int("a b", 0, 1), "symbol 'a b': that is no name"),
        (lambda s: s.int("x", 0, 4, default=7), "symbol 'x': the default 7 is not a candidate; it has 0 to 4"),
        (lambda s: (s.int("x", 0, 4), s.int("x", 0, 5)), "symbol 'x': declared twice, with 0 to 4 and 0 to 5"),
        (lambda s: s.int("given", 0, 4), "symbol 'given': 9 is not a candidate; it has 0 to 4"),
        (lambda s: s["y"], "no symbol 'y'"),
    ],
)
def test_what_cannot_be_a_symbol_is_one_sentence(declare: object, sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        declare(ScheduleSpace({"given": 9}))  # type: ignore[operator]


class Marked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.ReLU(), nn.ReLU())
        self.mark = nn.Parameter()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "with_space.py"
    path.write_text(FILE)
    return path


def replaced(file: Path, **options: object) -> tuple[int, str]:
    model = Marked()
    load_schedule(model, file, **options)  # type: ignore[arg-type]
    return sum(isinstance(each, nn.Tanh) for each in model), model.mark.kernel  # type: ignore[return-value]


def test_a_schedule_file_with_a_space_has_defaults_best_variable_and_config(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replaced(file) == (0, "eager")
    file.write_text(FILE + 'best = {"replaced": 1, "kernel": "flash"}\n')
    assert replaced(file) == (1, "flash")
    assert schedule_values(file) == {"replaced": 1, "kernel": "flash", "block": 32}
    assert replaced(file, config={"replaced": 2}) == (2, "flash")
    monkeypatch.setenv(VARIABLE, '{"replaced": 0}')
    assert replaced(file) == (0, "flash")
    assert replaced(file, config={"replaced": 2}) == (2, "flash")


@pytest.mark.parametrize(
    ("more", "config", "sentence"),
    [
        ("", {"replace": 1}, "config: the schedule has no symbol 'replace'; it has kernel, replaced"),
        ("", {"replaced": 3}, "with_space.py:7: symbol 'replaced': 3 is not a candidate; it has 0, 1, 2"),
        ("best = 3", None, "best is 3; make it a dict of values"),
        ("space = 3", None, "space is 3; make it a function"),
        ("def space(space): 1 / 0", None, "fails at .*with_space.py:.* with ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_whose_space_cannot_be_used_is_one_sentence(
    file: Path, more: str, config: dict[str, object] | None, sentence: str
) -> None:
    file.write_text(f"{FILE}{more}\n")
    model = Marked()
    with pytest.raises((ScheduleError, TuneError), match=sentence):
        load_schedule(model, file, config=config)
    assert not any(isinstance(each, nn.Tanh) for each in model)


def test_all_configurations_of_a_conditional_space_are_enumerated() -> None:
    found = [tuple(value for _, value in path) for path in enumerate_space(conditional, 10) or ()]
    assert found == [(1, 1), (1, 2), (1, 3), (2, 1, False), (2, 1, True), (2, 2, False), (2, 2, True)]
    assert enumerate_space(conditional, 6) is None
    assert enumerate_space(lambda space: None, 6) == []


def test_a_tree_gives_each_configuration_once() -> None:
    tree, found = Exploration(), []
    while not tree.is_exhausted:
        space = tree.untried_space(lambda symbol, default, left: left[-1])
        conditional(space)
        tree.add(space.path)
        found.append(tuple(space.values()))
    assert len(found) == len(set(found)) == 7
    with pytest.raises(ExhaustedError, match="all configurations of the space have been tried"):
        tree.untried_space(lambda symbol, default, left: left[0])


def test_trials_of_another_space_are_noticed() -> None:
    tree = Exploration((enumerate_space(conditional, 10) or [])[:2])
    space = tree.untried_space(lambda symbol, default, left: left[0])
    with pytest.raises(
        TuneError, match="the space has 1, 2, 4 for 'tp', and earlier trials had 1, 2: the database is of another"
    ):
        space.choice("tp", [1, 2, 4])
    with pytest.raises(TuneError, match="asks for 'kernel' where earlier trials had 'tp': the database is of another space"):
        tree.untried_space(lambda symbol, default, left: left[0]).choice("kernel", [1, 2])
    with pytest.raises(TuneError, match="symbol 'tp' has 1, 2, and 4 in an earlier trial"):
        conditional(ReplayedSpace({"tp": 4}))
