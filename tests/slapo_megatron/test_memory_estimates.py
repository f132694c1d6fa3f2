"""Estimated memory and collectives of Megatron's steps beside real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.engine_memory import check_collectives, estimated, largest_error, measured

pytestmark = [pytest.mark.needs("megatron-core"), pytest.mark.multiproc, pytest.mark.filterwarnings("ignore")]

_BOUND = 0.01
Case = tuple[dict[str, int], dict[str, Any]]
_SHARDED = {"distributed_optimizer": True, "precision": "bf16"}
_FAST: list[Case] = [({"dp": 2}, {}), ({"dp": 2}, {**_SHARDED, "microbatches": 2}), ({"pp": 2}, {"microbatches": 4})]
_SLOW: list[Case] = [
    ({"dp": 2}, {"precision": "bf16"}),
    ({"dp": 2}, {"precision": "bf16", "config": {"ddp": {"grad_reduce_in_fp32": False}}}),
    ({"dp": 2}, {**_SHARDED, "config": {"ddp": {"grad_reduce_in_fp32": False}}}),
    ({"dp": 2}, {"distributed_optimizer": True, "config": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5000}}}),
    ({"dp": 2, "checkpoints": 1}, {"clip": 1.0}),
    ({"tp": 2}, {"precision": "bf16"}),
    ({"pp": 2}, {"microbatches": 4, "precision": "bf16"}),
]


def _check(kind: str, cases: list[Case], ranks: int = 2) -> None:
    truth = run_distributed(measured, ranks, kind, "megatron", cases, timeout=280)
    for index, (layout, options) in enumerate(cases):
        real, found = [rank[index] for rank in truth], estimated(kind, "megatron", layout, options)
        assert largest_error(real, found) <= _BOUND, (layout, options)
        check_collectives(real, found)


def test_memory_and_collectives_are_those_of_real_ranks() -> None:
    _check("gpt2", _FAST)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_memory_in_all_precisions_and_layouts(kind: str) -> None:
    _check(kind, _SLOW)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_of_interleaved_stages() -> None:
    flush = {"config": {"transformer": {"overlap_p2p_comm_warmup_flush": True}}}
    group = {"config": {"transformer": {"microbatch_group_size_per_vp_stage": 3}}}
    layout = {"pp": 2, "stages": 4}
    cases: list[Case] = [
        (layout, {"microbatches": 4}),
        (layout, {"microbatches": 4, **_SHARDED}),
        (layout, {"microbatches": 2}),
        (layout, {"microbatches": 4, **flush}),
        (layout, {"microbatches": 6, **group}),
    ]
    _check("gpt2", cases)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_of_stages_and_of_shards() -> None:
    overlapped = {"config": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5000}}}
    cases: list[Case] = [
        ({"dp": 2, "pp": 2}, {"microbatches": 4}),
        ({"dp": 2, "pp": 2}, {"microbatches": 4, "clip": 1.0, **_SHARDED}),  # a tied parameter has a bucket of its own
        ({"dp": 2, "pp": 2}, {"microbatches": 2, "distributed_optimizer": True, **overlapped}),
        ({"dp": 2, "pp": 2, "stages": 4}, {"microbatches": 4, **_SHARDED}),
        ({"dp": 2, "tp": 2}, {"microbatches": 2}),
        ({"dp": 2, "tp": 2}, {"clip": 1.0, "distributed_optimizer": True}),
    ]
    _check("gpt2", cases, 4)
