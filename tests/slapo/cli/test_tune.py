"""``slapo tune`` of scripts and models, and schedule files with a space in the other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo.cli.schedule_flags import with_schedule_values
from slapo.run_data.settings import Settings
from slapo.training.tune_run import default_space, run_tuning
from slapo_core import SlapoError
from slapo_tune.schedule_space.exploration import enumerate_space

SPACE = """
def space(space):
    tp = space.choice("tp", [1, 2])
    space.choice("width", [8, 16] if tp == 1 else [8])

def schedule(sch, space):
    for layer in sch.select("*")[: space["width"] // 8]:
        layer.annotate("weight", "wide", True)
"""

SCRIPT = """
import json, sys
import torch, slapo_core
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
sch = slapo_core.load_schedule(model, "space.py")
with open("runs.txt", "a") as runs:
    runs.write(f"{sys.argv[1:]} {len(sch.journal)}\\n")
if sys.argv[1] == "2":
    sys.exit("no second rank")
print(json.dumps({"throughput": 10.0 * len(sch.journal)}))
"""


def tune(*arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit status and output, or the sentence of its error."""
    result = CliRunner().invoke(create_app(), ["tune", *arguments])
    if isinstance(result.exception, SlapoError):
        return 2, str(result.exception)
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.py").write_text(SPACE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_script_loads_the_schedule_file_with_the_values_of_a_trial(folder: Path) -> None:
    flags = ("--schedule", "space.py", "--db", "tune.json", "--save", "best.py", "--report", "tune.html", "--timeout", "60")
    status, output = tune(*flags, "train.py", "tp", "--lr", "{width}")
    assert status == 0, output
    runs = (folder / "runs.txt").read_text().splitlines()
    assert sorted(runs) == ["['1', '--lr', '16'] 2", "['1', '--lr', '8'] 1", "['2', '--lr', '8'] 1"]
    assert "best configuration: (tp: 1, width: 16): 20 samples/s\n" in output
    assert "(tp: 2, width: 8): train.py ended with exit code 1; the end of its output: no second rank" in output
    assert (folder / "best.py").read_text().startswith(SPACE)
    assert 'best = {"tp": 1, "width": 16}' in (folder / "best.py").read_text()
    assert "no second rank" in (folder / "tune.html").read_text()
    assert len(json.loads((folder / "tune.json").read_text())) == 4
    assert tune(*flags, "train.py", "tp", "--lr", "{width}")[0] == 0
    assert len((folder / "runs.txt").read_text().splitlines()) == 3


@pytest.mark.multiproc
def test_a_script_that_prints_no_throughput_is_one_sentence(folder: Path) -> None:
    (folder / "train.py").write_text("print('epoch 1')")
    status, output = tune("--schedule", "space.py", "--trials", "1", "train.py", "tp")
    assert status == 1
    assert "tune: no throughput after 1 trials, the last failure: train.py printed no throughput, as in " in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "tune: nothing to tune; give --model TYPE, or --schedule FILE SCRIPT, or --config FILE SCRIPT"),
        (("train.py",), "tune: a script needs --schedule FILE with its space, and no --model; or --config FILE"),
        (("--schedule", "missing.py", "train.py"), "schedule('missing.py'): it cannot be read: "),
        (("--schedule", "empty.py", "train.py"), "schedule('empty.py'): the file defines no function schedule(sch"),
        (
            ("--schedule", "plain.py", "train.py"),
            "schedule('plain.py'): it defines no space(space), and a script's model is not",
        ),
        (("--schedule", "space.py", "gone.py"), "tune('gone.py'): no such file or program"),
        (
            ("--schedule", "space.py", "--timeout", "soon", "train.py"),
            "--timeout soon: not a number of seconds; use one from 0",
        ),
        (("--model", "gpt2", "--heads", "3"), "--heads 3: --hidden 64 is not divisible by it"),
        (("--model", "gpt2", "--schedule", "missing.py"), "schedule('missing.py'): it cannot be read: "),
    ],
)
def test_what_cannot_be_used_is_one_sentence(folder: Path, arguments: tuple[str, ...], sentence: str) -> None:
    (folder / "plain.py").write_text("def schedule(sch):\n    pass\n")
    (folder / "empty.py").write_text("")
    status, output = tune(*arguments)
    assert status == 2
    assert output.startswith(sentence)


def flags_of(*arguments: str) -> dict[str, object]:
    """Return the flags of a command like ``slapo train``."""
    app, found = typer.Typer(), {}

    @app.command()
    def train(ctx: typer.Context, schedule: str = "", tp: int = 1, microbatches: int = 4, schedule_kind: str = "1f1b") -> None:
        found.update(with_schedule_values(ctx))

    result = CliRunner().invoke(app, [*arguments])
    if result.exception:
        raise result.exception
    return found


def test_flags_that_are_not_given_are_those_of_the_schedule_file(folder: Path) -> None:
    assert flags_of("--schedule", "space.py")["tp"] == 1
    (folder / "space.py").write_text(f'{SPACE}best = {{"tp": 2, "width": 8, "pipeline_schedule": "gpipe"}}\n')
    expected = {"schedule": "space.py", "tp": 2, "microbatches": 4, "schedule_kind": "gpipe"}
    assert flags_of("--schedule", "space.py") == expected
    assert flags_of("--schedule", "space.py", "--tp", "1") == {**expected, "tp": 1}
    assert flags_of("--schedule", "saved.json") == {**expected, "schedule": "saved.json", "tp": 1, "schedule_kind": "1f1b"}


def test_a_planner_s_file_sets_the_flags(folder: Path) -> None:
    text = 'layout = {"pp": 1, "tp": 2}\nbuild = {"microbatches": 8}\n\n\ndef schedule(sch):\n    pass\n'
    (folder / "planned.py").write_text(text)
    found = flags_of("--schedule", "planned.py")
    assert (found["tp"], found["microbatches"]) == (2, 8)


def test_the_layouts_of_a_model_without_a_file() -> None:
    settings = Settings(model="gpt2", layers=4, heads=4, batch=8, microbatches=1)
    found = [
        {symbol.name: value for symbol, value in path}
        for path in enumerate_space(lambda s: default_space(settings, 4, s), 999) or ()
    ]
    layouts = {(each["tp"], each["pp"], each["dp"]) for each in found}
    assert layouts == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    assert all(8 % (each["dp"] * each["microbatches"]) == 0 for each in found)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_a_tuned_model_is_trained_by_the_file_of_the_best(folder: Path) -> None:
    settings = Settings(model="gpt2", layers=2, hidden=32, seq=32, microbatches=1)
    assert run_tuning(settings, 2, trials=3, timeout=300.0, save="best.py", database="tune.json") == 0
    sizes = ["--layers", "2", "--hidden", "32", "--seq", "32", "--steps", "2", "--data", "best.py", "--reference"]
    command = [sys.executable, "-m", "slapo", "train", "--schedule", "best.py", *sizes]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks" in ran.stdout
    assert "the same within" in ran.stdout
