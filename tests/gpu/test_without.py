"""Parts of the GPU tests and benchmarks, run on a CPU so that they keep working."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import handwritten
from benchmarks.gpu import checkpoint, plan, stages, step
from benchmarks.gpu.timing import Sizes, table
from slapo_plan import Hardware
from slapo_testing import run_distributed

from .test_handwritten import beside_whole
from .test_ranks import beside_reference
from .test_training import CASES, beside_one_process

TINY = Sizes("cpu", vocabulary=64, hidden=32, heads=2, layers=4, batch=4, sequence=16, warm_up=1, rounds=2, in_a_row=1)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("layout", ["pp", "tp sequence", "fsdp"])
def test_ranks_that_share_a_device(layout: str, tmp_path: Path) -> None:
    for worst in run_distributed(beside_reference, 2, str(tmp_path / "store"), "gpt2", layout, "fp32", "cpu"):
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.slow
@pytest.mark.multiproc
def test_training_on_ranks_that_share_a_device(tmp_path: Path) -> None:
    for name in ("adafactor tp", "hook fsdp", "batch norm dp"):
        for worst in run_distributed(beside_one_process, 2, str(tmp_path / name), name, "cpu"):
            assert max(worst.values()) < CASES[name].limit, (name, worst)


@pytest.mark.slow
@pytest.mark.multiproc
def test_modules_written_by_hand_on_ranks_that_share_a_device(tmp_path: Path) -> None:
    kinds = ["SplitByWidth", "RelativeTable", "ListOfHeads"]
    assert run_distributed(beside_whole, 2, str(tmp_path / "store"), kinds, "cpu") == [{}, {}]


def test_benchmarks() -> None:
    tables = [step.compare("bf16", 2, TINY), *(stages.compare(name, TINY) for name in stages.MODELS)]
    tables.append(table("recomputed", checkpoint.steps_of(TINY), TINY))
    assert all("engine" in found or "stages" in found or "checkpoint()" in found for found in tables)
    assert len(handwritten.table(handwritten.Sizes("cpu", torch.bfloat16, 2, 8, {16: 2}))) == 4


def steps_of(rank: int, case: plan.Case) -> plan.Measured:
    return plan.measured(case, TINY, 1)


def test_estimates_beside_steps() -> None:
    case = plan.Case("bf16, recomputed", checkpoints=True)
    guess = plan.estimated(case, TINY, Hardware.load("this-machine"), 1)
    (found,) = run_distributed(steps_of, 1, case)  # a process without tensors of other tests
    line, memory, _ = plan.row(case, guess, found)
    assert line.startswith("| bf16, recomputed | ")
    assert abs(memory) < plan.MEMORY_LIMIT
