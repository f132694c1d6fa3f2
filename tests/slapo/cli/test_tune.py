"""``slapo tune`` of scripts and models, and schedule files with a space in the other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo.cli.schedule_flags import with_schedule_values
from slapo_core import SlapoError

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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--config", "c.py", "--trials", "5", "train.py"), "--trials: the classic tuner (--config) does not take it, but a "),
        (("--schedule", "space.py", "--model", "gpt2", "--ranks", "2"), "--ranks: a model with a schedule file does not take "),
        (("--schedule", "space.py", "--layers", "2", "train.py"), "--layers: a tuned script does not take it, but a model "),
        (("--model", "gpt2", "--error-stop", "all"), "--error-stop: a model without a schedule file does not take it, but "),
        (("--model", "gpt2", "--tp", "3", "--ranks", "4"), "--tp 3 does not make 4 ranks; use --ranks 3"),
        (("--model", "gpt2", "--tp", "2", "--pp", "1", "--dp", "1", "--ranks", "4"), "--tp 2 x --pp 1 x --dp 1 does not make"),
        (("--model", "gpt2", "--hardware", "h1000"), "no hardware 'h1000'"),
        (
            ("--model", "llama", "--schedule", "planned.py"),
            "--model llama: the schedule planned.py is for gpt2; leave ",
        ),
        (("--model", "gpt2", "--ranks", "-2"), "--ranks -2: not a positive number; use 1 or more"),
        (("--model", "gpt2", "--save", "best.txt"), "--save best.txt: a schedule file is Python; end its name in .py"),
        (("--model", "gpt2", "--save", "no/best.py"), "--save no/best.py: its folder is not there, or cannot be written to"),
        (("--schedule", "space.py", "--report", "no/tune.html", "train.py"), "--report no/tune.html: its folder is not there"),
        (("--model", "gpt2", "--seconds", "-3"), "tune: seconds is -3.0; give seconds above 0, or None"),
        (("--schedule", "space.py", "--trials", "0", "train.py"), "tune: trials is 0; give a whole number from 1 on"),
    ],
)
def test_flags_that_contradict_each_other_are_one_sentence(folder: Path, arguments: tuple[str, ...], sentence: str) -> None:
    (folder / "planned.py").write_text('model = {"model": "gpt2"}\n\n\ndef schedule(sch, space):\n    pass\n')
    status, output = tune(*arguments)
    assert status == 2
    assert output.startswith(sentence)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_a_tuned_folder_is_trained_by_the_file_of_the_best(folder: Path) -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=300, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    flags = ("--model", "./model", "--seq", "32", "--ranks", "2", "--trials", "3", "--timeout", "300", "--db", "tune.json")
    status, output = tune(*flags, "--save", "best.py")
    assert status == 0, output
    assert "tune: planning 2 ranks of this-machine\n" in output
    assert "tune: skipped " not in output
    assert "tune: verified: (" in output
    command = [sys.executable, "-m", "slapo", "train", "--schedule", "best.py", "--steps", "2", "--data", "best.py"]
    ran = subprocess.run([*command, "--reference"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks" in ran.stdout
    assert "the same within" in ran.stdout
