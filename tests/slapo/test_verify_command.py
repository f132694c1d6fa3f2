"""``slapo verify`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WRONG = """
from torch import nn

def schedule(sch):
    sch.tensor_parallel()
    sch["transformer.h.1.mlp.act"].replace(nn.ReLU())
"""


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", "from slapo.cli.app import main; main()", "verify", *flags]
    return subprocess.run(run, capture_output=True, text=True, timeout=100)


def test_a_schedule_that_changes_the_model_is_refused_with_its_step(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    found = command("--tp", "2", "--layers", "2", "--hidden", "32", "--seq", "8", "--schedule", str(file), "--json")
    assert (found.returncode, found.stderr) == (1, "")
    report = json.loads(found.stdout)
    assert report["ok"] is False
    assert report["blame"]["module"] == "transformer.h.1.mlp.c_proj"  # the first behind it whose output is whole
    assert report["blame"]["step"].startswith("2: sch['transformer.h.1.mlp.act'].replace(")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_what_is_made_without_a_file_is_the_same(model: str, dtype: str) -> None:
    flags = ("--sequence-parallel",) * (dtype == "fp32")
    found = command("--model", model, "--tp", "2", "--level", "step", "--dtype", dtype, "--checkpoint-layers", *flags)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("the same: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "3"), "--tp 3: 4 heads cannot be divided among 3 ranks"),
        (("--model", "gtp2"), "--model gtp2: transformers"),
        (("--level", "gradients"), "Invalid value for '--level'"),
    ],
)
def test_mistakes_are_told_before_any_rank_starts(flags: tuple[str, ...], message: str) -> None:
    found = command(*flags)
    assert found.returncode == 2
    assert message in found.stderr
