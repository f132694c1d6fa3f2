"""``slapo.ema`` beside torch's ``AveragedModel`` on the unmodified model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slapo_testing import run_distributed

from . import ema_runs

pytestmark = pytest.mark.multiproc
ZERO: dict[str, Any] = {f"zero{stage}": {"config": {"zero_optimization": {"stage": stage}}} for stage in range(4)}
CASES: list[Any] = [
    ("torch", {"tp": 2}, {"tp": {}}),
    ("torch", {"pp": 2}, {"pp": {}}),
    ("torch", {"dp": 2}, {"ddp": {}, "fsdp": {"data_parallel": "fsdp"}}),
    ("deepspeed", {"dp": 2}, ZERO),
    ("megatron", {"dp": 2}, {"ddp": {}, "shared_out": {"distributed_optimizer": True, "optimizer": ema_runs.adam}}),
    pytest.param("deepspeed", {"pp": 2}, {"pp": {}}, marks=pytest.mark.slow),
    pytest.param("megatron", {"tp": 2}, {"tp": {}}, marks=pytest.mark.slow),
]
LOADS: list[Any] = [
    ("torch", {"dp": 2}, {"data_parallel": "fsdp"}, {"tp": 2}, {}),
    pytest.param("torch", {"tp": 2}, {}, {"pp": 2}, {}, marks=pytest.mark.slow),
    ("deepspeed", {"dp": 2}, ZERO["zero2"], {"dp": 2}, ZERO["zero3"]),
    (
        "megatron",
        {"dp": 2},
        {"distributed_optimizer": True, "optimizer": ema_runs.adam},
        {"tp": 2},
        {"optimizer": ema_runs.adam},
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("target", "layout", "variants"), CASES)
def test_averages_are_those_of_torch(target: str, layout: dict[str, int], variants: dict[str, Any], tmp_path: Path) -> None:
    for found in run_distributed(ema_runs.beside_torch, 2, target, layout, variants, str(tmp_path)):
        assert max(value for each in found.values() for value in each) < 2e-6, found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("target", "layout", "options", "other", "others"), LOADS)
def test_checkpoints_have_averages_for_other_layouts(
    target: str,
    layout: dict[str, int],
    options: dict[str, Any],
    other: dict[str, int],
    others: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_distributed(ema_runs.beside_torch, 2, target, layout, {"first": options}, str(tmp_path))
    folder = str(tmp_path / "first" / "saved")
    for worst, updates in run_distributed(ema_runs.loaded, 2, target, other, others, folder, layout.get("dp", 1)):
        assert worst < 2e-6
        assert updates == 4


def test_buffers_are_averaged_where_asked() -> None:
    run_distributed(ema_runs.with_buffers, 1)


def test_averages_of_half_precision_are_in_fp32(tmp_path: Path) -> None:
    for moved, same in run_distributed(ema_runs.half_precision, 2, "megatron", str(tmp_path)):
        assert 1e-8 < moved < 1e-3
        assert same == 0


def test_wrong_calls_are_refused() -> None:
    for told in run_distributed(ema_runs.refused, 2):
        decay, ranks, copied, plain, train, save = told
        assert "decay is 1.5" in decay
        assert "different arguments" in ranks
        assert "slapo.ema(engine).applied()" in copied
        assert "AveragedModel(engine.module)" in plain
        assert train.startswith("train_batch inside of applied()")
        assert save.startswith("save inside of applied()")
