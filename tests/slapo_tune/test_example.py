"""The classic script: tuning GPT-2's batch size and checkpoint ratio, as the package's page shows it."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_memory.forward_wrappers.recomputation import is_checkpointed
from slapo_tune.command import main

TOP = Path(__file__).parents[2]
EXAMPLE = TOP / "examples" / "tune_gpt2"
PAGE = (TOP / "docs" / "guides" / "tuning.md").read_text()


def command() -> list[str]:
    """The arguments of ``slapo tune`` on the page."""
    (console,) = [each for each in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if each.startswith("$ cd examples")]
    change, line = re.findall(r"^\$ ((?:.*\\\n)*.*)$", console, re.MULTILINE)
    assert change == f"cd {EXAMPLE.relative_to(TOP)}"
    program, tune, *arguments = shlex.split(line.replace("\\\n", " "))
    assert (program, tune) == ("slapo", "tune")
    return arguments


def run(folder: Path) -> str:
    """Run the command in a folder that has the example's files, and return what it told of its trials."""
    tuned = subprocess.run(
        [sys.executable, "-m", "slapo.autotune.tune", *command()], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert tuned.returncode == 0, tuned.stderr
    check(folder, tuned.stdout, [(8, 1.0), (8, 0.0), (16, 1.0), (16, 0.67), (16, 0.34), (16, 0.0)])
    return tuned.stderr


def records(folder: Path) -> list[dict[str, Any]]:
    return [*json.loads((folder / "results.json").read_text()).values()]


def check(folder: Path, out: str, space: list[tuple[int, float]]) -> None:
    """All of the space was tried, checkpoints left the losses as they were, and the best was printed."""
    found = records(folder)
    assert [tuple(record["config"].values()) for record in found] == space
    assert all(record["error"] is None for record in found)
    best = max(found, key=lambda record: record["throughput"])
    size, ratio = best["config"].values()
    assert out == f"best configuration: (batch_size: {size}, ckpt_ratio: {ratio}), {best['throughput']:.5g} samples/s\n"
    for _, group in groupby(found, lambda record: record["config"]["batch_size"]):
        first, *others = (record["result"]["loss"] for record in group)
        assert others == pytest.approx([first] * len(others), abs=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in EXAMPLE.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_small_gpt2_is_tuned(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    arguments = command()
    arguments[arguments.index("--max-batch-size") + 1] = "8"
    assert main(arguments) == 0
    check(folder, capsys.readouterr().out, [(8, 1.0), (8, 0.0)])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.multiproc
def test_the_command_on_the_page_tunes_gpt2_once(folder: Path) -> None:
    assert "from the database" not in run(folder)
    before = records(folder)
    assert run(folder).count("from the database") == 6
    assert records(folder) == before


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 4), (0.67, 3), (0.5, 2), (0.34, 1), (0.0, 0)])
def test_the_schedule_checkpoints_the_share_of_the_blocks(ratio: float, count: int) -> None:
    train = runpy.run_path(str(EXAMPLE / "train.py"))
    sizes = {"n_layer": 4, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 8}
    model = train["scheduled"](GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), ratio)
    assert [is_checkpointed(block) for block in model.transformer.h] == [True] * count + [False] * (4 - count)
