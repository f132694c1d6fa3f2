"""Behaviour of other projects' engines, apart from training like one process on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core import build
from slapo_testing import run_distributed
from tests.engine_models import batches, my_part, small
from tests.engines import (
    Losses,
    alone,
    complex_buffer,
    frozen_modes,
    groups_and_rates,
    half_sharded,
    in_its_process,
    own_losses,
    parts_of_a_gradient,
    scheduled,
    started_apart,
    structures,
    trained,
    uneven,
    unreached,
    zero,
)
from tests.slapo_torch.layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc

TARGETS = ("deepspeed", "megatron")
DP, TP, PP = {"dp": 2}, {"tp": 2}, {"pp": 2}
WHOLE, SHARED = {"distributed_optimizer": False}, {"distributed_optimizer": True}
OVERLAPPED = {**WHOLE, "config": {"ddp": {"overlap_grad_reduce": True}}}
AVERAGED = {**SHARED, "config": {"ddp": {"overlap_grad_reduce": True, "average_in_collective": True}}}


def offloaded(rank: int, target: str, stage: int) -> Losses:
    """The optimizer's state, and with stage 3 the weights, are kept in the host's memory."""
    mesh, data = mesh_of(dp=2), batches(2)
    section: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        section["offload_param"] = {"device": "cpu"}
    config = {"zero_optimization": section, "zero_force_ds_cpu_optimizer": False}
    engine = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), target, optimizer=adamw, config=config)
    reference = small("gpt2")
    expected = alone(adamw(reference.parameters()), own_losses(reference, data))
    return trained(engine, [my_part(batch, mesh) for batch in data]), expected


Case = tuple[str, int, Any, tuple[Any, ...]]
QUICK: list[Case] = [
    ("deepspeed", 2, uneven, (DP, {})),
    ("deepspeed", 2, groups_and_rates, (TP, True, zero(2))),
    ("deepspeed", 2, frozen_modes, ({},)),
    ("megatron", 2, uneven, (DP, WHOLE)),
    ("megatron", 2, groups_and_rates, (DP, True, OVERLAPPED)),
    ("megatron", 2, structures, (2, 2, WHOLE)),
]
SLOW: list[Case] = [
    ("deepspeed", 2, uneven, (PP, {})),
    ("deepspeed", 2, groups_and_rates, (DP, False, zero(1))),
    ("deepspeed", 2, groups_and_rates, (DP, False, zero(3))),
    ("deepspeed", 2, groups_and_rates, (PP, False, zero(1))),
    ("deepspeed", 2, groups_and_rates, (PP, True, zero(0))),
    ("deepspeed", 2, structures, (2, 2, {})),
    ("deepspeed", 3, structures, (3, 3, {})),
    ("deepspeed", 2, unreached, ({},)),
    ("deepspeed", 4, half_sharded, ({},)),
    *(("deepspeed", 2, offloaded, (stage,)) for stage in (1, 2, 3)),
    ("megatron", 2, uneven, (PP, WHOLE)),
    ("megatron", 2, groups_and_rates, (DP, False, AVERAGED)),
    ("megatron", 2, groups_and_rates, (TP, True, SHARED)),
    ("megatron", 2, groups_and_rates, (PP, True, SHARED)),
    ("megatron", 2, structures, (2, 4, WHOLE)),
    ("megatron", 2, frozen_modes, (SHARED,)),
    ("megatron", 2, unreached, (WHOLE,)),
    ("megatron", 4, half_sharded, (WHOLE,)),
]


@pytest.mark.parametrize(
    ("target", "ranks", "case", "arguments"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_losses_are_those_of_one_process(target: str, ranks: int, case: Any, arguments: tuple[Any, ...]) -> None:
    for found, expected in run_distributed(case, ranks, target, *arguments):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("deepspeed", zero(0)),
        pytest.param("deepspeed", zero(3), marks=pytest.mark.slow),
        ("megatron", WHOLE),
        ("megatron", SHARED),
    ],
    ids=str,
)
def test_a_part_of_a_gradient_is_not_taken_for_the_whole(target: str, options: dict[str, Any]) -> None:
    for message, after in run_distributed(parts_of_a_gradient, 2, target, options):
        assert "the gradient of 'gate', which is whole, differs between tensor-parallel ranks" in message
        assert "a step of this engine failed with an error" in after


@pytest.mark.parametrize(
    ("target", "axis", "ranks"),
    [
        ("deepspeed", "tp", "tensor-parallel ranks"),
        ("megatron", "dp", "replicas"),
        ("megatron", "tp", "tensor-parallel ranks"),
    ],
)
def test_ranks_that_start_from_other_numbers_are_refused(target: str, axis: str, ranks: str) -> None:
    for message in run_distributed(started_apart, 2, target, {axis: 2}):
        assert f"the {ranks} start from different values of" in message
        assert "seed all ranks alike" in message


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-2)])
def test_complex_buffers_stay_complex(target: str, precision: str, tolerance: float) -> None:
    found, expected = complex_buffer(target, precision)
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("target", TARGETS)
def test_one_process_alone(target: str) -> None:
    found, expected = in_its_process(target)
    assert found == pytest.approx(expected, abs=2e-5)
