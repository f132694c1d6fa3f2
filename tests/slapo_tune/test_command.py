"""The command line: flags, what is refused before the first trial, Ctrl-C, and two tuners at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo_tune.command import main

from .conftest import PRINT, UPDATE_SPACE, Folder
from .test_trial_process import ENVIRONMENT, FAMILY, alive

NO_SPACE = "def update_space(args, space):\n    pass\n"
FOREVER = "names = iter(range(10**6))\n" + NO_SPACE.replace("pass", "space.create_symbol(f's{next(names)}', [1])")
FRESH = "import slapo_tune\n" + NO_SPACE.replace(
    "pass", "space = slapo_tune.Space(); space.create_symbol('a', [1]); return space"
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dbb", "x", "--config", "c.py", "train.py"], "unknown flag --dbb, did you mean --db; the script's own flags stand"),
        (["--config=config.py", "--verbose", "train.py"], "unknown flag --verbose; the script's own flags stand behind SCRIPT"),
        (["train.py", "--config", "config.py"], "the following arguments are required: --config; see"),
        (["--config", "config.py"], "the following arguments are required: SCRIPT"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "config.py", "--error-stop", "some", "train.py"], "argument --error-stop: invalid choice: 'some'"),
        (["--config", "config.py", "--timeout", "soon", "train.py"], "argument --timeout: 'soon' is not a number of seconds"),
        (["--config", "config.py", "--timeout=-1", "train.py"], "argument --timeout: '-1' is not a number of seconds"),
        (["--config", "missing.py", "train.py"], "config('missing.py'): no such Python file"),
        (["--config", "config.py", "missing.py"], "tune('missing.py'): no such file or program; give the training script"),
        (["--config", "config.py", "--db", "missing/x.json", "train.py"], "--db missing/x.json: its folder is not there"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_sentence(folder: Folder, arguments: list[str], sentence: str) -> None:
    folder.write(PRINT)
    assert main(arguments) == 2
    out, err = folder.capture.readouterr()
    assert out == ""
    assert err.startswith(f"tune: {sentence}")
    assert err.count("\n") == 1
    assert folder.runs == []


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("x = 1", "config('config.py'): the file has neither get_bs_range(args) nor update_space(args, space)"),
        ("update_space = 1", "config('config.py'): update_space is 1; make it a function"),
        ("import no_such_module", "config('config.py'): the file does not run: ModuleNotFoundError: No module named 'no_such"),
        ("def get_bs_range(args): return 8", "config('config.py'): get_bs_range returns 8; return (smallest, largest, step)"),
        ("def get_bs_range(args): return 8, 4, 1", "config('config.py'): get_bs_range returns (8, 4, 1); return"),
        ("def get_bs_range(args): return 8, 16, 0.5", "config('config.py'): get_bs_range returns (8, 16, 0.5); return"),
        (
            "def get_bs_range(args):\n    return int(args['gpus']), 8, 1",
            "config('config.py'): get_bs_range fails in line 2 with KeyError: 'gpus'; the script's arguments are: batch_size,",
        ),
        (
            UPDATE_SPACE.replace("[0.0]", "[0.0 / (batch_size - 16)]"),
            "config('config.py'): update_space fails in line 6 with Zero",
        ),
        (UPDATE_SPACE.replace("[1.0, 0.5]", "[]"), "symbol('ckpt_ratio'): it has no candidates where (batch_size: 4) is fixed"),
        (UPDATE_SPACE.replace('"batch_size"', '"path"'), "symbol('path'): the environment has a variable 'PATH' already"),
        (UPDATE_SPACE.replace("[1.0, 0.5]", "[object]"), "update_space: JSON cannot hold "),
        (NO_SPACE, "config('config.py'): update_space creates no symbol; create one"),
        (NO_SPACE.replace("pass", "return 3"), "update_space: it returned 3; return the space"),
        ("import sys; sys.exit('no')", "config('config.py'): the file does not run: SystemExit: no; run it alone"),
        (NO_SPACE.replace("pass", "exit(3)"), "config('config.py'): update_space fails in line 2 with SystemExit: 3"),
        (FOREVER, "update_space: it has made 100 symbols and makes more; make the same in every call"),
        (FRESH, "update_space: 'a' was fixed and is not in the space it leaves; return the one that"),
        (
            NO_SPACE.replace("pass", "space.create_symbol('x', ['a\\0'])"),
            "symbol('x'): neither arguments nor the environment of",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_sentence(folder: Folder, config: str, sentence: str) -> None:
    folder.write(PRINT, config)
    assert folder.tune() == 2
    assert folder.err.startswith(f"tune: {sentence}")
    assert folder.err.count("\n") == 1
    assert folder.runs == []


def test_it_is_a_command_of_slapo_too(folder: Folder) -> None:
    folder.write(PRINT)
    arguments = [
        "tune",
        "--config",
        "config.py",
        "--error-stop",
        "all",
        "train.py",
        "--batch-size",
        "batch_size",
        "--ratio=0.5",
    ]
    result = CliRunner().invoke(create_app(), arguments)
    assert result.exit_code == 0, result.output
    assert "best configuration: (batch_size: 16, ckpt_ratio: 1.0), 24 samples/s\n" in result.output
    shown = CliRunner().invoke(create_app(), ["tune", "--help"])
    assert shown.exit_code == 0
    assert all(flag in shown.output for flag in ("--config", "--db", "--error-stop", "--timeout", "slapo tune"))
    assert CliRunner().invoke(create_app(), ["tune", "--confg", "config.py"]).exit_code == 2


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_everything_and_prints_the_best_so_far(folder: Folder, number: signal.Signals) -> None:
    hang = "if batch_size == 8 and not os.path.exists('fast'):\n    exec(open('family.py').read()); time.sleep(60)\n"
    (folder.path / "family.py").write_text(ENVIRONMENT + FAMILY + "open('started', 'w').write(' '.join(started))\n")
    folder.write(hang + PRINT)
    tuner = folder.start("--db", "results.json")
    while not (folder.path / "started").exists() or not (started := (folder.path / "started").read_text().split()):
        assert tuner.poll() is None, tuner.communicate()
        time.sleep(0.05)
    tuner.send_signal(number)
    out, err = tuner.communicate(timeout=30)
    assert tuner.returncode == 128 + number
    assert out == "best configuration: (batch_size: 4, ckpt_ratio: 0.5), 6 samples/s\n"
    assert f"tune: interrupted by {number.name} after 2 of 8 trials" in err
    assert "Traceback" not in err
    assert len(started) == 5
    assert not any(map(alive, started))
    assert len(folder.results()) == 2
    (folder.path / "fast").touch()
    assert folder.tune("--db", "results.json") == 0
    assert folder.runs == ["4 1.0", "4 0.5", "8 1.0", "8 1.0", "8 0.5", "8 0.0", "16 1.0", "16 0.5", "16 0.0"]


@pytest.mark.multiproc
def test_a_signal_ends_a_configuration_that_does_not_end(folder: Folder) -> None:
    folder.write(PRINT, "open('started', 'w'); import itertools\n" + UPDATE_SPACE.replace("[4, 8, 16]", "itertools.count()"))
    tuner = folder.start()
    while not (folder.path / "started").exists():
        assert tuner.poll() is None, tuner.communicate()
        time.sleep(0.05)
    tuner.send_signal(signal.SIGTERM)
    out, err = tuner.communicate(timeout=30)
    assert (tuner.returncode, out) == (128 + signal.SIGTERM, "")
    assert err == "tune: interrupted by SIGTERM before the first trial\n"


@pytest.mark.multiproc
def test_a_tuner_that_is_killed_leaves_nothing_running(folder: Folder) -> None:
    (folder.path / "family.py").write_text(ENVIRONMENT + FAMILY + "open('started', 'w').write(' '.join(started))\n")
    folder.write("exec(open('family.py').read()); time.sleep(60)\n" + PRINT)
    tuner = folder.start("--db", "results.json")
    while not (folder.path / "started").exists() or not (started := (folder.path / "started").read_text().split()):
        assert tuner.poll() is None, tuner.communicate()
        time.sleep(0.05)
    tuner.kill()
    tuner.communicate(timeout=30)
    assert len(started) == 5
    deadline = time.monotonic() + 10
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, started))


def test_an_output_without_the_letters_of_a_name_gets_escapes(folder: Folder) -> None:
    folder.write("", NO_SPACE.replace("pass", "space.create_symbol('größe', [4])"))
    command = [sys.executable, "-m", "slapo.autotune.tune", "--config", "config.py", "sh", "-c", "echo '{\"throughput\": 3}'"]
    ran = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True, text=True)
    assert ran.stdout == "best configuration: (gr\\xf6\\xdfe: 4), 3 samples/s\n"


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_tuners_share_a_database(folder: Folder) -> None:
    folder.write("time.sleep(0.05)\n" + PRINT)
    arguments = [["--batch-size", "batch_size", "--ratio=ckpt_ratio", "--tuner", str(number)] for number in range(2)]
    tuners = [folder.start("--db", "results.json", arguments=each) for each in arguments]
    for tuner in tuners:
        out, err = tuner.communicate(timeout=60)
        assert tuner.returncode == 0, err
        assert out == "best configuration: (batch_size: 16, ckpt_ratio: 0.0), 32 samples/s\n"
    assert len(folder.results()) == 16
    for each in arguments:
        assert folder.tune("--db", "results.json", arguments=each) == 0
    assert len(folder.runs) == 16
