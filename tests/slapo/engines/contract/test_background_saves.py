"""Checkpoints of other projects' engines that are written while training goes on."""

from __future__ import annotations

import os
import random
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.background_saves import check_gone_on, check_in_vain, check_killed, in_vain, went_on
from tests.engines import zero

pytestmark = pytest.mark.multiproc
SHARED = {"distributed_optimizer": True}
GOES_ON: list[tuple[str, dict[str, int], int, dict[str, Any]]] = [
    ("deepspeed", {"dp": 2}, 1, zero(3)),
    ("deepspeed", {"dp": 2}, 1, {**zero(1), "precision": "bf16"}),
    ("deepspeed", {"pp": 2}, 1, {}),
    ("deepspeed", {"tp": 2}, 1, {}),
    ("deepspeed", {}, 1, {}),
    ("megatron", {"dp": 2}, 1, {**SHARED, "precision": "bf16"}),
    ("megatron", {"tp": 2}, 1, {"microbatches": 1}),
    ("megatron", {"pp": 2}, 2, {}),
    ("megatron", {}, 1, {}),
]


@pytest.mark.parametrize(
    ("target", "layout", "chunks", "options"),
    [("deepspeed", {"dp": 2}, 1, zero(2)), *(pytest.param(*case, marks=pytest.mark.slow) for case in GOES_ON)],
    ids=str,
)
def test_what_was_there_is_saved_and_training_goes_on(
    target: str, layout: dict[str, int], chunks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_distributed(went_on, prod(layout.values()), target, layout, chunks, options, str(tmp_path)):
        check_gone_on(found)


@pytest.mark.parametrize(
    ("target", "layout", "options"),
    [("deepspeed", {"dp": 2}, zero(1)), pytest.param("megatron", {"pp": 2}, {}, marks=pytest.mark.slow)],
    ids=str,
)
def test_what_keeps_a_checkpoint_from_being_written_is_told_once_on_all_ranks(
    target: str, layout: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    check_in_vain(*run_distributed(in_vain, 2, target, layout, options, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "layout", "options"),
    [("deepspeed", {}, {}), ("deepspeed", {"dp": 2}, zero(1)), ("megatron", {}, {}), ("megatron", {"dp": 2}, SHARED)],
    ids=str,
)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint(
    target: str, layout: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    seed = int(os.environ.get("SLAPO_TEST_SEED", time.time_ns() % 10**6))
    print(f"SLAPO_TEST_SEED={seed}")
    check_killed(target, tmp_path / "checkpoint", layout, options, random.Random(seed), times=6)
