"""``pieces``: what all ranks hold, put together, is the unmodified model, and behind a step that model behind a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core import build
from slapo_testing import run_distributed
from tests.engine_models import batches, my_part, small
from tests.engines import scheduled
from tests.slapo_torch.layouts import adamw, largest_difference, mesh_of, put_together

pytestmark = pytest.mark.multiproc


def pieced(rank: int, target: str, layout: dict[str, int], options: dict[str, Any]) -> tuple[float, float, float, bool]:
    """How far the pieces are from one process's model, before a step and behind it; how far that step went.

    And whether a weight that was trained has numbers that bf16 has not.
    """
    mesh, batch = mesh_of(**layout), batches(layout.get("dp", 1))[0]
    model, reference = small("gpt2"), small("gpt2")
    model.transformer.h[1].requires_grad_(False)
    reference.transformer.h[1].requires_grad_(False)
    model.register_buffer("table", torch.arange(3.0))
    reference.register_buffer("table", torch.arange(3.0))
    schedule = scheduled(model, mesh, my_part(batch, mesh))
    engine: Any = build(schedule, target, optimizer=adamw, microbatches=2, **options)
    before = largest_difference(put_together(engine, mesh), reference)
    engine.train_batch(**my_part(batch, mesh))
    found = put_together(engine, mesh)
    moved = largest_difference(found, reference)
    optimizer = adamw([parameter for parameter in reference.parameters() if parameter.requires_grad])
    reference(**batch).loss.backward()
    optimizer.step()
    after = largest_difference(found, reference)
    engine.close()
    weight = found["transformer.wte.weight"]
    return before, after, moved, weight.dtype is torch.float32 and not torch.equal(weight, weight.bfloat16().float())


ZERO = {"zero_optimization": {"stage": 1}}
CASES: list[Any] = [
    (
        "deepspeed",
        {"dp": 2},
        {"config": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "precision": "bf16"},
    ),
    ("deepspeed", {"dp": 2}, {"config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1}}}),
    ("deepspeed", {"tp": 2}, {"config": ZERO}),
    ("deepspeed", {"tp": 2}, {}),
    ("deepspeed", {"pp": 2}, {"config": ZERO, "precision": "bf16"}),
    ("megatron", {"dp": 2}, {"distributed_optimizer": True, "precision": "bf16"}),
    ("megatron", {"dp": 2}, {"distributed_optimizer": True}),
    ("megatron", {"tp": 2}, {"precision": "bf16"}),
    ("megatron", {"pp": 2}, {}),
]


@pytest.mark.parametrize(
    ("target", "layout", "options"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (index not in (0, 5))) for index, case in enumerate(CASES)],
    ids=str,
)
def test_the_pieces_of_all_ranks_are_the_model(target: str, layout: dict[str, int], options: dict[str, Any]) -> None:
    is_half = "precision" in options
    for before, after, moved, is_master in run_distributed(pieced, 2, target, layout, options, timeout=100):
        assert before < (1e-3 if is_half else 1e-7)
        assert after < (4e-3 if is_half else 1e-5)
        assert moved > 5e-3
        assert is_master
