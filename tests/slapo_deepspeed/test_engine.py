"""Behaviour of the DeepSpeed engine, apart from training like one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slapo.framework_dialect import get_dialect_cls
from slapo_core import build
from slapo_testing import run_distributed
from tests.engine_models import batches, my_part, small
from tests.engines import NO_OPTIMIZER, PLUGINS, scheduled, without_optimizer
from tests.slapo_torch.layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc

TOP = Path(__file__).parents[2]


def own_optimizer(rank: int) -> tuple[list[float], float, float, str]:
    """Losses with DeepSpeed's optimizer and schedule, its rate at the end; what an engine without does and says."""
    mesh, data = mesh_of(dp=2), batches(2)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
    }
    engine: Any = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), "deepspeed", config=config)
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    rate = engine.model.get_lr()[0]
    engine.close()
    return losses, rate, *without_optimizer("deepspeed", mesh)


def test_deepspeeds_own_optimizer_and_schedule_and_an_engine_without() -> None:
    first, second = run_distributed(own_optimizer, 2)
    assert first == second
    losses, rate, difference, message = first
    assert losses[-1] < losses[0]
    assert 0 < rate <= 1e-2
    assert difference < 2e-5
    assert message == NO_OPTIMIZER


def resumed(rank: int, layout: dict[str, int], zero: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of the last two of four steps, and those of an engine that was loaded before them."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))[:4]

    def engine_of() -> Any:
        schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
        return build(schedule, "deepspeed", optimizer=adamw, config={"zero_optimization": {"stage": zero}})

    engine = engine_of()
    for batch in data[:2]:
        engine.train_batch(**my_part(batch, mesh))
    engine.save(folder)
    expected = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:]]
    engine.close()
    engine = engine_of()
    engine.load(folder)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:]]
    engine.close()
    return found, expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "zero"), [({"dp": 2}, 0), ({"dp": 2}, 3), ({"tp": 2}, 1), ({"pp": 2}, 1)], ids=str)
def test_saving_and_going_on(layout: dict[str, int], zero: int, tmp_path: Path) -> None:
    for found, expected in run_distributed(resumed, 2, layout, zero, str(tmp_path)):
        assert found == expected


def printing(rank: int, layout: dict[str, int]) -> list[float]:
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))
    schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
    engine = build(schedule, "deepspeed", optimizer=adamw, config={"steps_per_print": 1})
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    engine.close()
    return losses


SCRIPT = """
import sys
from tests.slapo_deepspeed.test_engine import printing
import torch.distributed as dist
if __name__ == "__main__":
    dist.init_process_group("gloo")
    printing(dist.get_rank(), {"pp": 2})
    dist.destroy_process_group()
"""


def test_lines_of_an_engine_without_pipeline_are_read() -> None:
    parser: Any = get_dialect_cls("log_parser", "deepspeed", plugins=PLUGINS)
    when = "[2026-01-01 00:00:00,000] [INFO] [logging.py:128:log_dist] [Rank 0]"
    lines = [
        f"{when} step=10, skipped=1, lr=[0.001, 0.002], mom=[(0.9, 0.999)]",
        f"{when} epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=90.5, CurrSamplesPerSec=91.25, MemAllocated=0GB",
        "another line of step=3",
    ]
    assert parser.parse(lines) == [(10, None, 91.25, 0.001, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_both_launchers_start_it_and_its_log_is_read(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "javascript.py").write_text(SCRIPT)
    ranks = ["--nproc-per-node=2", "--standalone"] if launcher == "torchrun" else ["--num_gpus", "2", "--no_local_rank"]
    command = [str(Path(sys.executable).parent / launcher), *ranks, str(tmp_path / "javascript.py")]
    environment = {**os.environ, "PYTHONPATH": str(TOP), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    parser: Any = get_dialect_cls("log_parser", "deepspeed", plugins=PLUGINS)
    steps = parser.parse((result.stdout + result.stderr).splitlines())
    losses = run_distributed(printing, 2, {"pp": 2})[0]
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-4)
    assert all(step.samples_per_second > 0 for step in steps)
