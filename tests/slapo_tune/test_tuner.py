"""The tuner on real scripts: values, results, failures, and what the database makes unnecessary."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from slapo_tune.command import main

from .conftest import ARGUMENTS, PRINT, Folder

ALL = ["4 1.0", "4 0.5", "8 1.0", "8 0.5", "8 0.0", "16 1.0", "16 0.5", "16 0.0"]
ONE = (
    'def update_space(args, space):\n    space.create_symbol("batch_size", [4])\n    space.create_symbol("ckpt_ratio", [1.0])\n'
)
LAST = "best configuration: (batch_size: 16, ckpt_ratio: 0.0), 32 samples/s\n"


def test_every_configuration_is_run_and_the_best_is_printed(folder: Folder) -> None:
    folder.write(PRINT)
    assert folder.tune("--db", "results.json") == 0
    assert folder.runs == ALL
    assert folder.out == LAST
    assert "tune: trial 5/8 (batch_size: 8, ckpt_ratio: 0.0): 16 samples/s in 0." in folder.err
    results = folder.results()
    assert list(results)[0] == "train.py --batch-size batch_size --ratio=ckpt_ratio (batch_size: 4, ckpt_ratio: 1.0)"
    last = list(results.values())[-1]
    assert last["config"] == {"batch_size": 16, "ckpt_ratio": 0.0}
    assert (last["throughput"], last["error"]) == (32.0, None)
    assert last["command"] == "train.py --batch-size 16 --ratio=0.0"


def test_finished_trials_are_not_run_again(folder: Folder) -> None:
    folder.write('if batch_size == 8: sys.exit("no memory")\n' + PRINT)
    folder.tune("--db", "results.json")
    assert folder.runs == ALL
    assert folder.tune("--db", "results.json") == 0
    assert folder.runs == ALL
    assert folder.out == LAST
    assert (
        "trial 3/8 (batch_size: 8, ckpt_ratio: 1.0): from the database, train.py ended with exit code 1; the end" in folder.err
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        {"throughput": "8"},
        {"throughput": None},
        {"throughput": float("nan")},
        {"throughput": -1.0},
        {"seconds": None},
        {"error": 3},
        {"error": "no memory", "time_limit": "soon"},
    ],
)
def test_an_entry_that_no_trial_left_is_run_again(folder: Folder, change: dict[str, object]) -> None:
    folder.write(PRINT, ONE)
    folder.tune("--db", "results.json")
    ((key, record),) = folder.results().items()
    for entry in ({**record, **change}, [], None, {name: value for name, value in record.items() if name not in change}):
        (folder.path / "results.json").write_text(json.dumps({key: entry}))
        assert folder.tune("--db", "results.json") == 0
        assert folder.results()[key]["throughput"] == record["throughput"]
    assert len(folder.runs) == 5


def test_other_arguments_of_the_script_are_other_trials(folder: Folder) -> None:
    folder.write(PRINT, ONE)
    folder.tune("--db", "results.json")
    folder.tune("--db", "results.json", arguments=[*ARGUMENTS, "--layers", "2"])
    assert folder.runs == ["4 1.0"] * 2
    assert len(folder.results()) == 2


def test_without_a_database_nothing_is_left(folder: Folder) -> None:
    folder.write(PRINT, ONE)
    assert folder.tune() == 0
    assert sorted(file.name for file in folder.path.iterdir() if file.is_file()) == ["config.py", "runs.txt", "train.py"]


@pytest.mark.parametrize(
    ("stop", "runs", "status"),
    [("none", ALL, 0), ("symbol", [run for run in ALL if run not in ("8 0.0", "16 0.0")], 0), ("all", ALL[:4], 1)],
)
def test_what_a_failure_stops(folder: Folder, stop: str, runs: list[str], status: int) -> None:
    folder.write('if batch_size > 4 and ratio <= 0.5: sys.exit("no memory")\n' + PRINT)
    assert folder.tune("--db", "results.json", "--error-stop", stop) == status
    assert folder.runs == runs
    best = 16 if stop != "all" else 8
    assert folder.out == f"best configuration: (batch_size: {best}, ckpt_ratio: 1.0), {best} samples/s\n"
    assert ("ended by --error-stop all after 4 of 8 trials" in folder.err) == (stop == "all")
    assert folder.tune("--db", "results.json", "--error-stop", stop) == status
    assert folder.runs == runs


def failure(folder: Folder, timeout: str) -> str:
    """The sentence about the only trial, which fails."""
    assert folder.tune("--db", "results.json", "--timeout", timeout) == 1
    assert folder.out == ""
    told, verdict = folder.err.splitlines()
    assert verdict == "tune: no throughput after 1 of 1 trials, so there is no best configuration"
    (record,) = folder.results().values()
    assert record["throughput"] is None
    start = "tune: trial 1/1 (batch_size: 4, ckpt_ratio: 1.0): "
    assert told == start + record["error"]
    return told.removeprefix(start)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("", 'train.py printed no throughput, as in {"throughput": 12.5}; it printed nothing'),
        ("print('epoch 1')", 'train.py printed no throughput, as in {"throughput": 12.5}; the end of its output: epoch 1'),
        ("1 / 0", "train.py ended with exit code 1; the end of its output: ZeroDivisionError: division by zero"),
        (PRINT + "sys.exit(4)", 'train.py ended with exit code 4; the end of its output: {"throughput": 4.0}'),
        ("os.kill(os.getpid(), 9)", "train.py ended by SIGKILL; it printed nothing"),
        ("print('start'); time.sleep(60)", "train.py was killed at the time limit of 2 s; the end of its output: start"),
        (
            "print('{\"throughput\": NaN}')",
            "train.py printed what cannot be compared: the throughput is 'NaN', not a number; "
            'the end of its output: {"throughput": NaN}',
        ),
    ],
)
def test_a_script_that_fails_is_one_sentence_with_the_end_of_its_output(folder: Folder, script: str, sentence: str) -> None:
    folder.write(script, ONE)
    assert failure(folder, "2" if "time limit" in sentence else "60") == sentence


def test_a_trial_that_had_too_little_time_is_run_again_with_more(folder: Folder) -> None:
    folder.write("if not os.path.exists('fast'): time.sleep(60)\n" + PRINT, ONE)
    assert folder.tune("--db", "results.json", "--timeout", "1.5") == 1
    (folder.path / "fast").touch()
    assert folder.tune("--db", "results.json", "--timeout", "1.5") == 1
    assert folder.runs == ["4 1.0"]
    assert folder.tune("--db", "results.json", "--timeout", "0") == 0
    assert folder.runs == ["4 1.0"] * 2


def test_batch_sizes_alone_are_a_space(folder: Folder) -> None:
    folder.write(PRINT, "def get_bs_range(args):\n    return 4, int(args['largest']), 4\n")
    assert folder.tune(arguments=["--batch-size", "batch_size", "--ratio=0.5", "--largest", "12"]) == 0
    assert folder.runs == ["4 0.5", "8 0.5", "12 0.5"]


def test_batch_sizes_with_a_place_for_the_ratio(folder: Folder) -> None:
    folder.write(PRINT, "def get_bs_range(args):\n    return 4, 8, 4\n")
    assert folder.tune() == 0
    ratios = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25, 0.0)
    assert folder.runs == [f"{size} {ratio}" for size, ratio in product((4, 8), ratios)]


def test_both_functions_share_the_batch_size(folder: Folder) -> None:
    more = 'def update_space(args, space):\n    space.create_symbol("ckpt_ratio", [1.0 if space["batch_size"] > 4 else 0.0])\n'
    folder.write(PRINT, "def get_bs_range(args):\n    return 4, 8, 4\n" + more)
    assert folder.tune() == 0
    assert folder.runs == ["4 0.0", "8 1.0"]


def test_a_configuration_may_import_what_lies_beside_it(folder: Folder) -> None:
    (folder.path / "sizes_of_my_model.py").write_text("SIZES = [4]\n")
    folder.write(PRINT, "from sizes_of_my_model import SIZES\n" + ONE.replace("[4]", "SIZES"))
    assert folder.tune() == 0
    assert folder.runs == ["4 1.0"]


def test_a_damaged_database_is_an_error_before_the_first_trial(folder: Folder) -> None:
    folder.write(PRINT)
    (folder.path / "results.json").write_text('{"a": ')
    assert folder.tune("--db", "results.json") == 2
    assert folder.err.startswith("tune: database('results.json'): the file is damaged: ")
    assert (folder.path / "results.json").read_text() == '{"a": '
    assert folder.runs == []


def test_a_database_that_is_damaged_meanwhile_is_an_error_after_the_best_so_far(folder: Folder) -> None:
    folder.write("if batch_size == 8: open('results.json', 'w').write('{')\n" + PRINT)
    assert folder.tune("--db", "results.json") == 2
    assert folder.out == "best configuration: (batch_size: 4, ckpt_ratio: 0.5), 6 samples/s\n"
    assert "the file is damaged" in folder.err.splitlines()[-1]
    assert Path("results.json").read_text() == "{"


def test_a_script_that_is_a_program_runs_by_itself(folder: Folder) -> None:
    folder.write("", ONE)
    program = folder.path / "train.sh"
    program.write_text('#!/bin/sh\necho "{\\"throughput\\": $BATCH_SIZE}"\n')
    program.chmod(0o755)
    assert main(["--config", "config.py", str(program)]) == 0
    assert main(["--config", "config.py", "sh", "-c", "echo '{\"throughput\": 3}'"]) == 0


def test_a_script_that_logs_as_deepspeed_does_needs_no_line_of_json(folder: Folder) -> None:
    pytest.importorskip("slapo_deepspeed")
    step = "print(f'steps: {step} loss: 4.5 iter time (s): 0.5 samples/sec: {batch_size * step}', file=sys.stderr)"
    folder.write(f"for step in (1, 2, 3, 4): {step}\n", ONE)
    assert folder.tune("--db", "results.json") == 0
    assert folder.out == "best configuration: (batch_size: 4, ckpt_ratio: 1.0), 12 samples/s\n"
    (record,) = folder.results().values()
    assert record["result"] == {"throughput": 12.0, "log_parser": "deepspeed"}
