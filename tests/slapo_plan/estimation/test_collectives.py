"""Sizes of reductions that are computed rather than run."""

from __future__ import annotations

import torch

from slapo_torch.step_collectives import ddp_buckets
from slapo_training import GradientSize


def test_ddp_buckets_start_small_and_then_fill() -> None:
    arrivals = [GradientSize(2**18, torch.float32)] * 30  # 1 MiB each
    assert [size // 2**20 for size in ddp_buckets(arrivals)] == [1, 25, 4]


def test_ddp_buckets_hold_one_type() -> None:
    arrivals = [GradientSize(10, torch.float32), GradientSize(10, torch.bfloat16), GradientSize(1, torch.float32)]
    assert sorted(ddp_buckets(arrivals)) == [20, 44]
