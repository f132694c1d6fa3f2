"""Pruners: trials that report their throughput are stopped, with a sentence, in scripts and in resumed searches too."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from slapo_core import UnknownNameError
from slapo_tune import ScheduleSpace, TuneResult
from slapo_tune.script_tuning import search_script
from slapo_tune.search import Budget
from slapo_tune.study.pruners import make_pruner
from slapo_tune.study.storage import open_storage
from slapo_tune.trial.process import Interruption, run_trial
from slapo_tune.trial.reports import ReportReader, TrialReport, printed_report
from slapo_tune.tuning_run import SearchSettings, run_search

from .subjects import FunctionSubject


def widths(space: ScheduleSpace) -> None:
    space.int("width", 0, 11)


def width_seconds(values: Mapping[str, Any]) -> float:
    """Return seconds of which a quarter of the configurations has the least."""
    return 1.0 + values["width"] % 4


def search(pruner: Any, trials: int = 12, database: Any = None, steps: Sequence[int] = (6, 9, 14, 21, 32)) -> TuneResult:
    subject = FunctionSubject(widths, width_seconds, steps=steps)
    settings = SearchSettings(Budget(trials), sampler="random", pruner=make_pruner(pruner, 6, 40))
    return run_search(subject, database, settings, Interruption(), lambda line: None)


PRUNERS = ("interval", "median", "hyperband", optuna.pruners.ThresholdPruner(lower=3.0))


@pytest.mark.parametrize("pruner", PRUNERS, ids=["interval", "median", "hyperband", "threshold"])
def test_slow_trials_are_stopped_with_a_sentence_and_the_best_is_the_same(pruner: Any) -> None:
    result = search(pruner)
    stopped = [trial for trial in result.trials if trial.state == "pruned"]
    assert result.best is not None
    assert result.best.seconds == 1.0
    assert stopped
    assert not result.failures
    name = pruner if isinstance(pruner, str) else "threshold"
    for trial in stopped:
        assert trial.message.startswith(
            f"stopped after step {trial.steps} by the {name} pruner: {trial.throughput:.5g} samples"
        )
        assert trial.throughput is not None
        assert trial.throughput < 8.0
    assert f"{len(result.trials)} trials, {len(stopped)} of them stopped as slow, 0 failures" in str(result)


def test_without_a_pruner_every_trial_is_measured_to_the_end() -> None:
    result = search("none")
    assert {trial.state for trial in result.trials} == {"measured"}
    assert {trial.steps for trial in result.trials} == {32}


def test_the_interval_pruner_stops_what_is_clear_of_the_best_alone() -> None:
    seconds = {0: 1.0, 1: 1.1, 2: 1.2}
    subject = FunctionSubject(lambda space: space.int("width", 0, 2), lambda values: seconds[values["width"]], steps=(6,))
    result = run_search(subject, None, SearchSettings(Budget(3)), Interruption(), lambda line: None)
    states = {trial.values["width"]: trial.state for trial in result.trials}
    assert states == {0: "measured", 1: "measured", 2: "pruned"}


@pytest.mark.parametrize("kind", ["json", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_a_resumed_search_prunes_by_the_trials_of_the_earlier_one(kind: str, tmp_path: Path) -> None:
    database = str(tmp_path / "tune.json") if kind == "json" else f"sqlite:///{tmp_path}/tune.db"
    first = search("none", 5, database, (6,))
    assert {trial.state for trial in first.trials} == {"measured"}
    result = search("median", 8, database, (6,))
    assert len(result.trials) == 8
    assert result.trials[:5] == first.trials
    assert "pruned" in {trial.state for trial in result.trials[5:]}
    storage, _ = open_storage(database)
    found = {trial.number: trial for trial in optuna.load_study(study_name=None, storage=storage).trials}
    for trial in result.trials:
        stored = found[trial.number]
        assert stored.state == (TrialState.PRUNED if trial.state == "pruned" else TrialState.COMPLETE)
        assert stored.intermediate_values[trial.steps] == stored.value == trial.throughput


def test_an_unknown_pruner_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no pruner 'mediam'; did you mean 'median'"):
        make_pruner("mediam")
    with pytest.raises(UnknownNameError, match="no pruner '3'"):
        make_pruner(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        '{"throughput": 3.0}',
        '{"throughput": "fast", "step": 3}',
        '{"throughput": -1, "step": 3}',
        '{"throughput": 3.0, "step": "3"}',
        '{"throughput": 3.0, "step": true}',
        '"step"',
        "",
    ],
)
def test_other_lines_are_no_reports(line: str) -> None:
    assert printed_report(line) is None


def test_a_report_has_an_interval_if_it_prints_one() -> None:
    assert printed_report('{"throughput": 3.0, "step": 2}') == TrialReport(2, 3.0, None, {"throughput": 3.0, "step": 2})
    report = printed_report('{"samples_per_second": 3, "step": 2, "interval": [2.5, 3.5]}')
    assert report is not None
    assert (report.throughput, report.interval) == (3.0, (2.5, 3.5))


HANGING = """
import json, time
for step in range(1, 5):
    print("epoch", step)
    print(json.dumps({"throughput": 10 - step, "step": step}), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("script", [HANGING, HANGING.replace("time.sleep(60)", "")], ids=["running", "ended"])
def test_a_trial_is_stopped_at_the_report_that_the_pruner_refuses_whether_or_not_it_has_ended(script: str) -> None:
    seen: list[int] = []

    def prune(report: TrialReport) -> str:
        seen.append(report.step)
        return "too slow" if report.throughput < 8 else ""

    reports = ReportReader(prune)
    output = run_trial([sys.executable, "-c", script], {}, 30.0, Interruption(), reports=reports)
    assert output is not None
    assert not output.timed_out
    assert output.seconds < 30
    assert seen == [1, 2, 3]
    assert reports.sentence == "too slow"
    assert reports.last is not None
    assert reports.last.step == 3


SPACE = "def space(space):\n    space.int('width', 0, 7)\n\n\ndef schedule(sch, space):\n    pass\n"
SCRIPT = """
import json, sys, time
width = int(sys.argv[1])
for step in range(1, 4):
    print(json.dumps({"throughput": 10.0 - width, "step": step}), flush=True)
    time.sleep(0.01)
if width > 5:
    time.sleep(60)
print(json.dumps({"throughput": 10.0 - width, "step": 4, "loss": 1.5}))
"""


def test_a_script_that_reports_its_throughput_is_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.py").write_text(SPACE)
    Path("train.py").write_text(SCRIPT)
    lines: list[str] = []
    result = search_script(["train.py", "width"], "space.py", 8, 50.0, None, "tune.json", "random", "median", 3, lines.append)
    assert result.best is not None
    assert result.best.values == {"width": 0}
    assert result.best.output == {"loss": 1.5}
    stopped = [trial for trial in result.trials if trial.state == "pruned"]
    assert stopped
    assert all(trial.steps == 1 for trial in stopped)
    record = json.loads(Path("tune.json").read_text())[f"train.py width with space.py (width: {stopped[0].values['width']})"]
    assert record["throughput"] is None
    assert record["error"].startswith("stopped after step 1 by the median pruner: ")
