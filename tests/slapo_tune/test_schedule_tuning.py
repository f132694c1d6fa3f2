"""``slapo.tune`` on processes: measured trials, failures, time limits, verification, and the file of the best."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo_core import load_schedule
from slapo_tune import MeasurementSettings, TuneError, tune
from slapo_tune.measurement.job import TrialJob
from slapo_tune.measurement.launcher import error_sentence
from slapo_tune.measurement.step_timing import StepMeasurement, median_interval, time_steps

from .models import Blocks, LargeBlocks, batch, behave, layout, replace_large, replace_one, schedule

QUICK = MeasurementSettings(warmup=1, max_steps=6, max_seconds=1.0)
FILE = """
def space(space):
    space.choice("dp", [1, 2])

def schedule(sch, space):
    for block in sch.select("blocks.*")[: space.int("checkpointed", 0, 4)]:
        block.checkpoint()
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def run(schedule: Any, **options: Any) -> Any:
    lines: list[str] = []
    given = {"trials": 1, "measurement": QUICK, "report": lines.append, "timeout": 100.0, **options}
    return tune(schedule, Blocks(), batch(), **given), lines


@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_a_file_with_a_space_is_searched_and_the_best_is_a_schedule_file(tmp_path: Path) -> None:
    file = tmp_path / "blocks.py"
    file.write_text(FILE.replace('"dp", [1, 2]', '"dp", [2]'))
    before = [*Blocks().parameters()]
    result, lines = run(file)
    (trial,) = result.trials
    assert result.best == trial
    assert (trial.state, trial.verified, trial.steps) == ("measured", True, 6)
    assert trial.values == {"dp": 2, "checkpointed": 0}
    assert trial.throughput == pytest.approx(4 / trial.seconds)
    assert trial.interval[0] <= trial.throughput <= trial.interval[1]
    assert lines[0].startswith("trial 1/1 (dp: 2, checkpointed: 0): ")
    assert lines[1] == "verified: (dp: 2, checkpointed: 0)"
    assert not dist.is_initialized()
    assert len(before) == 16
    result.save(tmp_path / "best.py")
    text = (tmp_path / "best.py").read_text()
    assert text.startswith(file.read_text())
    assert 'best = {"dp": 2, "checkpointed": 0}\n# trial 0 of blocks.py of Blocks' in text
    assert len(load_schedule(Blocks(), tmp_path / "best.py").journal) == 0
    result.report(tmp_path / "tune.html")
    assert "blocks.py of Blocks" in (tmp_path / "tune.html").read_text()


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_a_function_is_searched_and_its_steps_are_saved(tmp_path: Path) -> None:
    result, _ = run(schedule, space=layout, trials=4, database=tmp_path / "tune.json")
    assert result.best is not None
    result.save(tmp_path / "best.py")
    sch = load_schedule(Blocks(), tmp_path / "best.py")
    assert len(sch.journal) == result.best.values["checkpointed"]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_failures_are_results_with_one_sentence() -> None:
    result, lines = run(behave, trials=5, layout={"dp": 2}, timeout=40.0)
    messages = {trial.values["behaviour"]: trial.message for trial in result.trials}
    assert result.best is None
    assert messages["memory"][len("rank 0: ") :].startswith("out of memory: ")
    assert messages["raise"].endswith("ValueError: no such luck")
    assert messages["kill"] == "rank 1 was ended by SIGKILL, as the system does where memory runs out"
    assert messages["hang"].startswith("the trial was killed at the time limit of 40 s; ")
    assert messages["refused"].startswith("refused: ")
    assert "blocks.7" in messages["refused"]
    assert not any("\n" in message for message in messages.values())
    assert lines[-1] == "all configurations of the space have been tried"


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_one_that_computes_something_else_is_not_the_best() -> None:
    result, _ = run(replace_one, trials=2)
    (wrong,) = [trial for trial in result.trials if trial.values["wrong"]]
    assert result.best is None or not result.best.values["wrong"]
    assert wrong.verified is not True
    if wrong.verified is False:
        assert wrong.message.startswith("not the same as the unmodified model: ")


@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_a_best_whose_verification_runs_out_of_memory_stays_the_best_and_says_so() -> None:
    lines: list[str] = []
    given = {"trials": 1, "measurement": QUICK, "report": lines.append, "timeout": 100.0}
    result = tune(replace_large, LargeBlocks(), batch(), **given)  # type: ignore[arg-type]
    assert result.best is not None
    assert (result.best.verified, result.best.state, result.failures) == (None, "measured", ())
    assert result.verification_problem.startswith("rank 0: out of memory: ")
    assert lines[-1].startswith("(small: True) could not be verified: rank 0: out of memory")


SCRIPT = """
import torch, slapo_tune
from tests.slapo_tune.models import Blocks, batch, schedule

if __name__ == "__main__":
    slapo_tune.tune(schedule, Blocks(), batch(), trials=4, database="tune.json", verify=False)
"""


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_a_killed_tuner_leaves_no_process_and_the_next_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "mine.py"]
    tuner = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert tuner.stderr is not None
    assert "trial 1/4" in tuner.stderr.readline()
    time.sleep(3)
    tuner.kill()
    tuner.communicate()
    deadline = time.monotonic() + 20
    while (left := launchers(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    second = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    assert "trial 2/4" in second.stderr.readline()
    second.send_signal(signal.SIGINT)
    _, errors = second.communicate(timeout=60)
    assert "interrupted by SIGINT after " in errors
    assert "best so far: (checkpointed: " in errors
    assert launchers(tmp_path) == []


def launchers(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"slapo_tune.measurement" in (process / "cmdline").read_bytes() and (process / "cwd").resolve() == folder:
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trials": 0}, "tune: trials is 0; give a whole number from 1 on"),
        ({"timeout": -1}, "tune: timeout is -1; give seconds above 0, or None"),
        ({"layout": {"ep": 2}}, "tune: layout has 'ep'; its axes are pp, dp and tp"),
        ({"layout": {"tp": 0}}, "symbol 'tp': 0 is no number of ranks; use 1 or more"),
        ({"device": "tpu"}, "tune: device is 'tpu'; use 'cpu', 'cuda' or 'auto'"),
        ({"optimizer": lambda parameters: None}, "a trial's processes cannot be given optimizer: .*; define functions and"),
        ({"space": lambda space: None}, "a trial's processes cannot be given space: "),
    ],
)
def test_arguments_that_cannot_be_used_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TuneError, match=sentence):
        run(schedule, **options)


def late(sch: Any, space: Any) -> None:
    space.choice("tp", [1, 2])


def test_a_folder_that_cannot_hold_the_job_is_one_sentence_without_advice_on_functions() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TuneError, match="cannot hold temporary files: .*; set TMPDIR to another folder") as error:
            run(schedule, space=layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "top level" not in str(error.value)


def test_no_folder_for_temporary_files_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TuneError, match="missing cannot hold temporary files: No such file or directory; set TMPDIR"):
        run(schedule, space=layout)


def test_a_layout_that_only_the_schedule_declares_is_one_sentence() -> None:
    with pytest.raises(
        TuneError, match=r"symbol 'tp': the layout needs it before the schedule runs; declare it in space\(space"
    ):
        run(late)


def test_a_call_from_a_trial_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLAPO_TUNE_TRIAL", "1")
    with pytest.raises(TuneError, match="call it under `if __name__ == '__main__'"):
        run(schedule)


def test_rows_that_do_not_divide_are_refused_with_what_would() -> None:
    job = TrialJob(Blocks(), schedule, batch())
    with pytest.raises(
        Exception, match="a batch of 4 rows cannot be divided among 3 data-parallel ranks x 2 micro-batches; use a "
    ):
        job.example_inputs(Blocks(), {"dp": 3, "microbatches": 2})
    args, kwargs = job.example_inputs(Blocks(), {"dp": 2, "microbatches": 2})
    assert args == ()
    assert {name: tuple(value.shape) for name, value in kwargs.items()} == {"x": (1, 8), "labels": (1, 8)}


def test_the_median_has_an_interval_from_six_steps_on() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    low, high = median_interval([float(number) for number in range(100)]) or (0.0, 0.0)
    assert (low, high) == (40.0, 59.0)


def test_measuring_ends_when_the_interval_is_narrow_and_reports_until_then() -> None:
    steps: list[float] = []
    reports: list[StepMeasurement] = []

    def step() -> None:
        steps.append(time.perf_counter())
        time.sleep(0.002)

    settings = MeasurementSettings(warmup=2, precision=1e-9, max_steps=15, max_seconds=60)
    timing = time_steps(step, settings, reports.append, bool)
    assert (timing.steps, len(steps)) == (15, 17)
    assert timing.seconds > 0.002
    assert [each.steps for each in reports] == [6, 9, 14]
    assert all(each.interval is not None for each in reports)
    reports.clear()
    assert time_steps(step, replace(settings, precision=1e9), reports.append, bool).steps == 6
    assert reports == []


def test_running_out_of_memory_begins_with_these_words() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**55)
    assert error_sentence(raised.value).startswith("out of memory: ")
    assert error_sentence(MemoryError()) == "out of memory: MemoryError"
    assert error_sentence(ValueError("a\nb")) == "ValueError: a b"
