"""``slapo verify`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo_core import SlapoError

WRONG = """
from torch import nn

def schedule(sch):
    sch.tensor_parallel()
    sch["transformer.h.1.mlp.act"].replace(nn.ReLU())
"""
SMALL = ("--layers", "2", "--hidden", "32", "--seq", "8")


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "slapo", "verify", *flags]
    return subprocess.run(run, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [pytest.param((), id="threads"), pytest.param(("--processes",), id="processes", marks=pytest.mark.slow)]
)
def test_a_schedule_that_changes_the_model_is_refused_with_its_step(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    found = command("--tp", "2", *SMALL, "--schedule", str(file), "--json", *ranks)
    assert (found.returncode, found.stderr) == (1, "")
    report = json.loads(found.stdout)
    assert report["ok"] is False
    assert report["blame"]["module"] == "transformer.h.1.mlp.c_proj"  # the first behind it whose output is whole
    assert report["blame"]["step"].startswith("2: sch['transformer.h.1.mlp.act'].replace(")


CUT = """
from torch import nn

def schedule(sch):
    sch.pipeline(2)
    sch["transformer.h.1.mlp.act"].replace(nn.ReLU())
"""
NO_THREADS = """
import torch.distributed as dist

def schedule(sch):
    if dist.get_backend() == "threaded":
        raise RuntimeError("not in a thread")
    sch.tensor_parallel()
"""


@pytest.mark.slow
def test_where_threads_fail_ranks_are_processes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(NO_THREADS)
    found = command("--tp", "2", *SMALL, "--schedule", str(file))
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("the same: ")


@pytest.mark.slow
def test_a_pipeline_is_trained_and_the_step_in_it_is_blamed(tmp_path: Path) -> None:
    file = tmp_path / "cut.py"
    file.write_text(CUT)
    found = command("--pp", "2", *SMALL, "--schedule", str(file), "--json")
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert (report["ok"], report["subject"]) == (False, "torch")
    assert report["blame"]["step"].startswith("2: sch['transformer.h.1.mlp.act'].replace(")
    assert report["blame"]["engine"] is None


@pytest.mark.slow
def test_two_engines_are_verified_and_compared() -> None:
    found = command("--pp", "2", *SMALL, "--against", "deepspeed", "--json")
    assert found.returncode == 0, found.stderr
    both = json.loads(found.stdout.splitlines()[-1])
    assert [both[name]["subject"] for name in ("deepspeed", "torch")] == ["deepspeed", "torch against deepspeed"]
    assert both["ok"] is both["torch"]["ok"] is both["deepspeed"]["ok"] is True


@pytest.mark.slow
def test_gradients_are_clipped_in_both() -> None:
    found = command("--dp", "2", *SMALL, "--clip", "0.01", "--data-parallel", "fsdp")
    assert found.returncode == 0, found.stderr
    assert "clip=0.01" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torch", "deepspeed", "megatron"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_four_ranks_of_every_engine(target: str, dtype: str) -> None:
    found = command("--model", "llama", "--tp", "2", "--pp", "2", "--target", target, "--dtype", dtype, "--checkpoint-layers")
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{target}: the same: " in found.stdout


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
        (("--target", "tensorflow"), "no dialect 'tensorflow'; available: "),
        (("--target", "torch", "--dtype", "fp64"), "--dtype fp64: engines have no such precision"),
        (("--dtype", "fp16"), "--dtype fp16: only of engines"),
        (("--clip", "1"), "--clip 1.0: nothing clips gradients without an engine; give --target"),
        (("--against", "torch"), "--against torch: that is the target itself"),
        (("--batch", "3", "--dp", "2"), "--batch 3: not divisible by 2 data-parallel ranks"),
    ],
)
def test_mistakes_are_told_before_any_rank_starts(flags: tuple[str, ...], message: str) -> None:
    found = CliRunner().invoke(create_app(), ["verify", *flags])
    assert isinstance(found.exception, (SlapoError, SystemExit)), found.output
    assert message in found.output + str(found.exception)
    assert not dist.is_initialized()


def test_a_mistake_is_one_sentence_and_its_own_status() -> None:
    found = command("--against", "torch")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1
    assert "--against torch: that is the target itself" in found.stderr
