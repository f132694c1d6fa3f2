"""Checkpoints of DeepSpeed's that are written while training goes on."""

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
TARGET = "deepspeed"


@pytest.mark.parametrize(
    ("layout", "chunks", "options"),
    [
        ({"dp": 2}, 1, zero(2)),
        pytest.param({"dp": 2}, 1, zero(3), marks=pytest.mark.slow),
        pytest.param({"dp": 2}, 1, {**zero(1), "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, 1, {}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 1, {}, marks=pytest.mark.slow),
        pytest.param({}, 1, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_was_there_is_saved_and_training_goes_on(
    layout: dict[str, int], chunks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_distributed(went_on, prod(layout.values()), TARGET, layout, chunks, options, str(tmp_path)):
        check_gone_on(found)


def test_what_keeps_a_checkpoint_from_being_written_is_told_once_on_all_ranks(tmp_path: Path) -> None:
    check_in_vain(*run_distributed(in_vain, 2, TARGET, {"dp": 2}, zero(1), str(tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "options"), [({}, {}), ({"dp": 2}, zero(1))], ids=str)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint(
    layout: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    seed = int(os.environ.get("SLAPO_TEST_SEED", time.time_ns() % 10**6))
    print(f"SLAPO_TEST_SEED={seed}")
    check_killed(TARGET, tmp_path / "checkpoint", layout, options, random.Random(seed), times=6)
