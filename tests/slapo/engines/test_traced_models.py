"""Traced models on engines that share out weights: a call that is traced while they train must not run what is theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo_testing import run_distributed
from tests.slapo.primitive_orders import PARTS, batch, make, plain_losses


def traced(sch: slapo.Schedule, how: str, blocks: str, attention: str) -> None:
    if how == "all":
        sch.trace()
    elif how == "flat":
        sch.trace(flatten=True)
    for block in sch.select(f"{blocks}.*") if how in ("blocks", "attention", "rewritten") else ():
        (block if how == "blocks" else block[attention]).trace(flatten=True)
        if how == "rewritten":
            block[attention].checkpoint(lambda x: x.softmax(-1))


def train(rank: int, name: str, how: str, target: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of three steps, the last one on shorter sequences: of the engine, and of the unmodified model."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    batches = [batch(0, 8), batch(1, 8), batch(2, 8, length=8)]
    sch = slapo.create_schedule(make(name), mesh=mesh, example_inputs=batches[0])
    traced(sch, how, *PARTS[name][:2])
    engine = slapo.build(sch, target, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2, **options)
    losses = [float(engine.train_batch(**{key: value.chunk(2)[rank] for key, value in each.items()})) for each in batches]
    engine.close()
    return losses, plain_losses(make(name), batches)


FSDP: tuple[str, dict[str, Any]] = ("torch", {"data_parallel": "fsdp"})
ZERO3: tuple[str, dict[str, Any]] = ("deepspeed", {"config": {"zero_optimization": {"stage": 3}}})
FAST = [("plain", "flat", *FSDP), ("plain", "rewritten", *ZERO3)]
SLOW = [
    (name, how, *engine)
    for name in PARTS
    for how in ("all", "flat", "blocks", "attention", *(["rewritten"] if name == "plain" else []))
    for engine in (FSDP, ZERO3, ("torch", {}), ("deepspeed", {"config": {"zero_optimization": {"stage": 2}}}), ("megatron", {}))
    if (name, how, *engine) not in FAST
]


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "how", "target", "options"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_losses_are_those_of_the_unmodified_model(name: str, how: str, target: str, options: dict[str, Any]) -> None:
    losses, expected = run_distributed(train, 2, name, how, target, options, timeout=100)[0]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
