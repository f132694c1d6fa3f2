"""Searches: no configuration twice, failures and refusals, plans, resumption, several tuners, and what ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pytest

from slapo_core import SlapoError
from slapo_tune import Database, ScheduleSpace, TuneError, TuneResult
from slapo_tune.sampling.search_plan import Predictions
from slapo_tune.schedule_space.schedule_space import configuration_key
from slapo_tune.search import Budget
from slapo_tune.study.ownership import own_process
from slapo_tune.study.storage import JOURNAL_KEY, open_storage
from slapo_tune.study.tuning_study import TuningStudy, running_trial
from slapo_tune.subjects.subject import UnfinishedVerificationError
from slapo_tune.trial.process import Interruption
from slapo_tune.tuning_run import SearchSettings, run_search

from .subjects import FunctionSubject, layout_seconds, layouts

LINES: list[str] = []


def search(subject: FunctionSubject, trials: int = 12, database: Any = None, plan: Any = None, **settings: Any) -> TuneResult:
    LINES.clear()
    chosen = SearchSettings(Budget(trials), predictions=Predictions(plan), **settings)
    with Interruption() as interruption:
        return run_search(subject, database, chosen, interruption, LINES.append)


def keys(subject: FunctionSubject) -> list[str]:
    return [configuration_key(values) for values in subject.measured]


def small(space: ScheduleSpace) -> None:
    if space.choice("kind", ["a", "b"]) == "a":
        space.int("depth", 0, 2)


@pytest.mark.parametrize("sampler", ["plan", "tpe", "random", optuna.samplers.TPESampler(seed=1)], ids=str)
def test_no_configuration_is_run_twice_and_an_exhausted_space_ends_the_search(sampler: Any) -> None:
    subject = FunctionSubject(small, lambda values: 1 + values.get("depth", 5))
    result = search(subject, 10, sampler=sampler)
    assert len(keys(subject)) == len({*keys(subject)}) == 4
    assert LINES[-2] == "all configurations of the space have been tried"
    assert result.best is not None
    assert result.best.values == {"kind": "a", "depth": 0}
    assert subject.measured[0] == {"kind": "a", "depth": 0}


def test_symbols_that_only_the_schedule_declares_are_searched_too() -> None:
    subject = FunctionSubject(small, lambda values: 1 + values.get("depth", 5), declares=False)
    search(subject, 10)
    assert len({*keys(subject)}) == 4


def test_the_best_of_a_hundred_is_found_in_a_fifth_of_the_trials() -> None:
    result = search(FunctionSubject(), 25)
    assert result.best is not None
    assert result.best.values == {"kind": "fsdp", "microbatches": 4, "reshard": False, "checkpointed": 0}
    assert set(list(result.importances)[:2]) == {"kind", "checkpointed"}
    assert sum(result.importances.values()) == pytest.approx(1)
    assert result.best_so_far[-1] == result.best.throughput


class Candidate(NamedTuple):
    settings: dict[str, Any]
    step_seconds: float


class Rejected(NamedTuple):
    settings: dict[str, Any]
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class Plan:
    """A plan that is a thousand times too fast, and wrong about ``fsdp``."""

    def __init__(self, rejected: tuple[Rejected, ...] = ()) -> None:
        values = [
            {"kind": kind, "microbatches": count, "nodes": 1} for kind in ("ddp", "fsdp", "tensor") for count in (1, 2, 4, 8)
        ]
        found = [Candidate(each, self.seconds(each)) for each in values]
        self.candidates = sorted(found, key=lambda each: each.step_seconds)
        self.rejected = rejected

    @staticmethod
    def seconds(values: Mapping[str, Any]) -> float:
        factor = 2.0 if values["kind"] == "fsdp" else 1.0
        return factor * layout_seconds({**values, "checkpointed": 0}) / 1000


def test_a_plan_s_order_is_where_the_search_starts_and_its_error_is_learned() -> None:
    subject = FunctionSubject()
    result = search(subject, 12, plan=Plan())
    assert (subject.measured[0]["kind"], subject.measured[0]["microbatches"]) == ("ddp", 4)
    assert result.trials[0].predicted == pytest.approx(0.001)
    assert result.best is not None
    assert result.best.values["kind"] == "fsdp"
    assert result.best.seconds == pytest.approx(0.8, rel=0.06)


def test_what_a_plan_rules_out_is_skipped_with_its_sentence() -> None:
    subject = FunctionSubject()
    plan = Plan((Rejected({"kind": "ddp"}, "ddp: 90 GiB of 80"), Rejected({"kind": "fsdp", "microbatches": 1}, "too large")))
    result = search(subject, 30, plan=plan)
    assert "ddp" not in {each["kind"] for each in subject.measured}
    sentences = [sentence for _, sentence in result.skipped]
    assert (sentences.count("ddp: 90 GiB of 80"), sentences.count("too large")) == (36, 18)
    assert result.to_dict()["failures"][0] == "(kind: ddp, microbatches: 1, checkpointed: 0): skipped: ddp: 90 GiB of 80"

    class Judging(Plan):
        def impossible(self, settings: Mapping[str, Any]) -> str:
            return "no" if settings["microbatches"] > 1 else ""

    subject = FunctionSubject()
    search(subject, 5, plan=Judging())
    assert {each["microbatches"] for each in subject.measured} == {1}


def test_a_planner_s_rejections_name_what_they_rule_out() -> None:
    class Rejection(NamedTuple):
        settings: Mapping[str, Any]
        reason: str

        def __str__(self) -> str:
            return self.reason

    plan = Plan((Rejection({"tp": 16, "pp": 2}, "8 heads"), Rejection({"tp": 4, "data_parallel": "fsdp"}, "no")))
    predictions = Predictions(plan)
    assert "8 heads" in predictions.impossible({"tp": 16, "pp": 2, "dp": 1})
    assert predictions.impossible({"tp": 16, "pp": 1}) == ""
    assert predictions.impossible({"tp": 4, "pp": 1}) == ""


@pytest.mark.parametrize("plan", [object(), Candidate({}, 1.0), type("P", (), {"candidates": [Candidate({"tp": 1}, -1.0)]})()])
def test_what_is_no_plan_is_one_sentence(plan: object) -> None:
    with pytest.raises(TuneError, match=r"prune: .*; give"):
        search(FunctionSubject(), plan=plan)


def test_failures_are_results_with_their_sentence() -> None:
    def seconds(values: Mapping[str, Any]) -> float:
        if values["kind"] == "fsdp":
            raise MemoryError("out of memory: 3 GiB")
        return layout_seconds(values)

    def refusals(values: Mapping[str, Any]) -> str:
        return "refused: tensor: 8 heads" if values["kind"] == "tensor" else ""

    result = search(FunctionSubject(seconds=seconds, refusals=refusals), 15)
    assert {each.message for each in result.failures} == {"out of memory: 3 GiB", "refused: tensor: 8 heads"}
    assert sum(each.state != "refused" for each in result.trials) == 15
    assert result.best is not None
    assert result.best.values["kind"] == "ddp"


def test_a_space_of_refusals_ends_with_a_sentence() -> None:
    subject = FunctionSubject(refusals=lambda values: "refused: 8 heads")
    with pytest.raises(TuneError, match="21 configurations have been refused, the last one: refused: 8 heads; mend the space"):
        search(subject, 2)


def test_a_schedule_without_symbols_is_one_sentence() -> None:
    with pytest.raises(TuneError, match="the schedule declares no symbol; declare one"):
        search(FunctionSubject(lambda space: None, declares=False))


def test_one_that_is_not_verified_is_a_failure_and_the_next_best_is_taken(tmp_path: Path) -> None:
    subject = FunctionSubject(wrong=lambda values: "not the same" if values["kind"] == "fsdp" else "")
    database = tmp_path / "tune.json"
    result = search(subject, 25, database)
    assert result.best is not None
    assert (result.best.values["kind"], result.best.verified) == ("ddp", True)
    refuted = [each for each in result.failures if each.message == "not the same"]
    assert refuted
    assert all(each.verified is False and each.state == "failed" for each in refuted)
    assert result.best_so_far[-1] == result.best.throughput
    again = search(FunctionSubject(wrong=lambda values: pytest.fail("asked again")), 25, database)
    assert again.best == result.best
    records = [record for key, record in json.loads(database.read_text()).items() if key != JOURNAL_KEY]
    assert {record["error"] for record in records} == {None, "not the same"}
    assert search(subject, 25, verify=False).best.verified is None  # type: ignore[union-attr]


def test_a_verification_without_a_verdict_is_not_held_against_the_best_and_the_next_run_tries_again(tmp_path: Path) -> None:
    def out_of_time(values: Mapping[str, Any]) -> str:
        raise UnfinishedVerificationError("the verification was killed at the time limit of 2 s")

    database = tmp_path / "tune.json"
    result = search(FunctionSubject(wrong=out_of_time), 9, database)
    assert result.best is not None
    assert (result.best.verified, result.best.state) == (None, "measured")
    assert result.failures == ()
    sentence = "could not be verified: the verification was killed at the time limit of 2 s"
    assert f"{sentence}; it stays the best so far" in LINES[-1]
    assert "not verified: the verification was killed" in str(result)
    assert result.to_dict()["failures"] == [f"the best {sentence}"]
    again = search(FunctionSubject(), 9, database)
    assert again.best is not None
    assert (again.best.number, again.best.verified) == (result.best.number, True)
    assert again.verification_problem == ""


def database_of(kind: str, folder: Path) -> str:
    return str(folder / "tune.json") if kind == "json" else f"sqlite:///{folder}/tune.db"


@pytest.mark.parametrize("kind", ["json", "sqlite"])
def test_a_search_goes_on_where_it_was_interrupted(kind: str, tmp_path: Path) -> None:
    database, first, second = database_of(kind, tmp_path), FunctionSubject(), FunctionSubject()
    first.interrupt_after = 5
    result = search(first, 9, database)
    assert result.interrupted == 2
    assert "interrupted by SIGINT after 5 trials; the same call goes on there; best so far: (" in LINES[-1]
    result = search(second, 9, database)
    assert len(second.measured) == 4
    assert len({*keys(first), *keys(second)}) == 9
    assert [each.number for each in result.trials] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert result.interrupted == 0


@pytest.mark.parametrize("kind", ["json", "sqlite"])
def test_tuners_at_one_database_share_the_trials(kind: str, tmp_path: Path) -> None:
    database, subjects = database_of(kind, tmp_path), [FunctionSubject() for _ in range(3)]
    TuningStudy(open_storage(database)[0], "function")
    settings = SearchSettings(Budget(9), predictions=Predictions(None))
    problems: list[BaseException] = []

    def run(subject: FunctionSubject) -> None:
        try:
            run_search(subject, database, settings, Interruption(), lambda line: None)
        except BaseException as err:
            problems.append(err)

    threads = [threading.Thread(target=run, args=(subject,)) for subject in subjects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    found = [key for subject in subjects for key in keys(subject)]
    assert len(found) == len({*found})
    assert 9 <= len(found) <= 11  # the last ones may start together
    if kind == "json":
        storage, classic = open_storage(database)
        assert classic is not None
        assert len(classic.db) == len(found) + 1


def test_a_trial_of_a_killed_tuner_is_run_again(tmp_path: Path) -> None:
    database = str(tmp_path / "tune.json")
    study = TuningStudy(open_storage(database)[0], "function")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = [(symbol, value) for symbol, value in default_path()]
    owner = {**own_process(), "pid": child.pid}
    study.study.add_trial(running_trial(path, {"owner": owner}))
    owner["started"] = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    study.study.add_trial(running_trial(path, {"owner": owner}))
    assert len(study.trials()) == 1  # the first says another start, as of a number that is used again
    child.communicate(b"\n")
    assert study.trials() == []
    subject = FunctionSubject()
    search(subject, 1, database)
    assert subject.measured == [{symbol.name: value for symbol, value in path}]


def default_path() -> list[Any]:
    space = ScheduleSpace()
    layouts(space)
    return [(space.definitions[name], value) for name, value in space.items()]


def test_the_classic_database_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    Database(file).commit("train.py (batch_size: 8)", {"throughput": 3.0})
    result = search(FunctionSubject(small, lambda values: 2.0), 3, file)
    database = Database(file)
    database.load()
    assert database.db["train.py (batch_size: 8)"] == {"throughput": 3.0}
    record = database.db[f"function (kind: {result.trials[0].values['kind']}, depth: 0)"]
    assert record["throughput"] == 4.0
    assert record["error"] is None
    assert set(record) == {"config", "throughput", "error", "seconds", "time_limit", "command", "result"}


@pytest.mark.parametrize("declares", [True, False])
def test_a_database_of_another_space_is_one_sentence(declares: bool, tmp_path: Path) -> None:
    database = tmp_path / "tune.json"
    search(FunctionSubject(small, lambda values: 1.0, declares=declares), 2, database)

    def other(space: ScheduleSpace) -> None:
        if space.choice("kind", ["a", "b"]) == "a":
            space.int("depth", 3, 5)

    with pytest.raises(SlapoError, match="the database is of another space: symbol 'depth' has 3, 4, 5, and 0 in an earlier"):
        search(FunctionSubject(other, declares=declares), 4, database)
    with pytest.raises(TuneError, match="the database is of another space"):
        search(FunctionSubject(lambda space: space.int("width", 0, 3), declares=declares), 4, database)


@pytest.mark.parametrize(
    ("database", "sentence"),
    [
        ("missing/tune.json", "its folder is not there"),
        ("sqlite:////missing/tune.db", "optuna cannot open it: "),
        ("nothing://tune", "optuna cannot open it: "),
    ],
)
def test_a_database_that_cannot_be_used_is_one_sentence(database: str, sentence: str) -> None:
    with pytest.raises(TuneError, match=sentence) as raised:
        search(FunctionSubject(), database=database)
    assert "\n" not in str(raised.value)


def test_a_damaged_database_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    for content, sentence in (('{"a": ', "the file is damaged"), (json.dumps({JOURNAL_KEY: ["{"]}), "is damaged: ")):
        file.write_text(content)
        with pytest.raises(TuneError, match=sentence):
            search(FunctionSubject(), database=file)
        assert file.read_text() == content


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence_after_the_best_so_far(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"

    class Filling(FunctionSubject):
        def measure(self, *args: Any, **kwargs: Any) -> Any:
            if len(self.measured) == 2:
                (tmp_path / "tune.json.unfinished").symlink_to("/dev/full")
            return super().measure(*args, **kwargs)

    with pytest.raises(TuneError, match="it cannot be written: .*No space left on device; choose another file"):
        search(Filling(), 5, file)
    assert LINES[-1].startswith("best so far: (kind: ")
    assert not (tmp_path / "tune.json.unfinished").exists()
    subject = FunctionSubject()
    search(subject, 5, file)
    assert len(subject.measured) == 3


def test_unknown_samplers_are_named() -> None:
    with pytest.raises(SlapoError, match="no sampler 'tpi'"):
        search(FunctionSubject(), sampler="tpi")


def test_the_budget_of_seconds_ends_the_search() -> None:
    settings = SearchSettings(Budget(50, 1e-9), predictions=Predictions(None))
    result = run_search(FunctionSubject(), None, settings, Interruption(), LINES.append)
    assert result.trials == ()
    assert result.best is None
    assert result.budget == {"trials": 50, "search_seconds": 1e-9}


def test_progress_says_the_best_so_far_and_what_is_left() -> None:
    settings = SearchSettings(Budget(3, 60), predictions=Predictions(None))
    LINES.clear()
    result = run_search(FunctionSubject(), None, settings, Interruption(), LINES.append)
    first = "trial 1/3 (kind: ddp, microbatches: 1, checkpointed: 0): 6.6667 samples/s in 0.0 s; best so far 6.6667 samples/s"
    assert LINES[0].startswith(first)
    assert LINES[0].endswith(", trial 0; 60 s left")
    assert LINES[-1].startswith("verified: (")
    assert "3 trials, 0 failures, 0 skipped\nbest: (" in str(result)
