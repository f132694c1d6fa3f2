"""Estimated memory and collectives of DeepSpeed's steps beside real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_plan import fake_ranks
from slapo_plan.estimation.estimate import estimate
from slapo_testing import run_distributed
from tests.engine_memory import SMALL, batch, check_collectives, estimated, largest_error, make, measured, schedule

pytestmark = [pytest.mark.needs("deepspeed"), pytest.mark.multiproc, pytest.mark.filterwarnings("ignore")]

Case = tuple[dict[str, int], dict[str, Any]]


def _zero(stage: int, **options: Any) -> dict[str, Any]:
    own = {"stage3_prefetch_bucket_size": 5000, "stage3_param_persistence_threshold": 100} if stage == 3 else {}
    section = {**own, **SMALL, **options.pop("zero", {})}
    return {"config": {"zero_optimization": {"stage": stage, **(section if stage else {})}}, **options}


_FAST: list[Case] = [
    ({"dp": 2}, _zero(1, precision="bf16", microbatches=2)),
    ({"dp": 2}, _zero(2, microbatches=2)),
    ({"pp": 2}, _zero(1, microbatches=4)),
    ({"dp": 2}, _zero(3)),
]
_SLOW: list[Case] = [
    ({"dp": 2}, _zero(0, clip=1.0)),
    ({"dp": 2}, _zero(1)),
    ({"dp": 2}, _zero(1, zero={"contiguous_gradients": False})),
    ({"dp": 2}, _zero(2, precision="bf16")),
    ({"dp": 2, "checkpoints": 1}, _zero(1)),
    ({"tp": 2}, _zero(1, precision="bf16")),
    ({"pp": 2}, _zero(0, microbatches=4)),
    ({"pp": 2}, _zero(1, microbatches=4, precision="bf16")),
    ({"dp": 2}, _zero(3, microbatches=2, precision="bf16")),
    ({"dp": 2}, _zero(1, zero={"use_multi_rank_bucket_allreduce": False})),
    ({"dp": 2}, _zero(2, zero={"reduce_scatter": False}, clip=1.0)),
    ({"dp": 2}, _zero(3, zero={"reduce_scatter": False})),
    ({"dp": 2}, _zero(2, zero={"reduce_bucket_size": 3_000})),  # buckets smaller than some parameters
    ({"tp": 2}, _zero(0, clip=1.0)),
    ({"dp": 2, "checkpoints": 1}, _zero(3)),
    ({"dp": 2, "checkpoints": 1}, _zero(3, microbatches=2, precision="bf16", zero={"memory_efficient_linear": False})),
    ({"tp": 2}, _zero(3)),
]


_FOUR_RANKS: list[Case] = [
    ({"dp": 2, "pp": 2}, _zero(0, microbatches=4, clip=1.0)),
    ({"dp": 2, "pp": 2}, _zero(1, microbatches=4, precision="bf16", clip=1.0)),
    ({"dp": 2, "tp": 2}, _zero(1, microbatches=2)),
    ({"dp": 2, "tp": 2}, _zero(2)),
    ({"dp": 2, "tp": 2}, _zero(3)),
]


def _check(kind: str, cases: list[Case], ranks: int = 2) -> None:
    truth = run_distributed(measured, ranks, kind, "deepspeed", cases, timeout=280)
    for index, (layout, options) in enumerate(cases):
        real, found = [rank[index] for rank in truth], estimated(kind, "deepspeed", layout, options)
        assert largest_error(real, found) <= 0.005, (layout, options)
        check_collectives(real, found)


def test_memory_and_collectives_are_those_of_real_ranks() -> None:
    _check("gpt2", _FAST)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_memory_of_all_stages_and_precisions(kind: str) -> None:
    _check(kind, _SLOW)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_of_stages_and_of_shards() -> None:
    _check("gpt2", _FOUR_RANKS, 4)


@pytest.mark.parametrize(
    ("layout", "options", "sentence"),
    [
        ({"pp": 2}, _zero(2, microbatches=2), "stage 2 or 3 of ZeRO with a pipeline"),
        ({"dp": 2}, _zero(2, zero={"offload_optimizer": {"device": "cpu"}}), "estimates leave out offload_optimizer"),
        ({"dp": 2}, _zero(0, precision="bf16"), "training in bf16 with stage 0 of ZeRO"),
    ],
)
def test_what_cannot_be_estimated_is_a_problem(layout: dict[str, int], options: dict[str, Any], sentence: str) -> None:
    with fake_ranks(**layout) as mesh:
        with torch.device("meta"):
            model = make("gpt2")
        found = estimate(schedule(model, mesh, layout), batch(options), target="deepspeed", **options)
    assert not found.ranks
    assert sentence in found.problems[0]
