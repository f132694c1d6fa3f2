"""Parameters that not all micro-batches use: what engines do with them is right, told or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_deepspeed.plugin
import slapo_megatron.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_torch.layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_deepspeed.plugin, slapo_megatron.plugin])


class Partly(nn.Module):
    """Uses one layer on all replicas, one on some, and one on none."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.none = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.some(self.all(x)) if x.sum() > 0 else self.all(x)


def told(rank: int, target: str, config: Any) -> list[str]:
    schedule = create_schedule(Partly(), mesh=mesh_of(dp=2), plugins=PLUGINS)
    engine = build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, microbatches=2, config=config)
    x = torch.full((4, 4), 1.0 if rank else -1.0)
    with warnings_told() as messages:
        for _ in range(2):
            engine.train_batch(x=x, labels=x)
    engine.close()
    return [message for message in messages if "CPU mode" not in message]


@pytest.mark.parametrize(
    ("target", "config"),
    [("deepspeed", {}), ("megatron", {})],
    ids=["deepspeed", "megatron"],
)
def test_what_no_replica_used_is_named(target: str, config: dict[str, Any]) -> None:
    for messages in run_distributed(told, 2, target, config):
        assert len(messages) == 1
        assert messages[0].startswith("'none.weight' and 1 more got no gradient in the first step")
        assert f"target {target!r} takes zeros" in messages[0]


class Either(nn.Module):
    """Rows decide which of two layers of one size is used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.one(x) if x.sum() > 0 else self.two(x))


def either(rank: int, target: str, zero: int, among_replicas: bool) -> tuple[float, str]:
    """How far losses are from those of one process, whose replicas or micro-batches use different layers; or the refusal."""
    torch.manual_seed(0)
    model, reference = Either(), Either()
    reference.load_state_dict(model.state_dict())
    schedule = create_schedule(model, mesh=mesh_of(dp=2), plugins=PLUGINS)
    options: dict[str, Any] = {"config": {"zero_optimization": {"stage": zero}}} if target == "deepspeed" else {}
    parts = 1 if among_replicas else 2
    engine = build(schedule, target, optimizer=plain, loss_fn=F.mse_loss, microbatches=parts, **options)
    halves = [torch.tensor([[1.0] * 4, [2.0] * 4]), torch.full((2, 4), -0.5)]
    own = halves[rank] if among_replicas else torch.cat(halves)
    optimizer, worst = plain(reference.parameters()), 0.0
    for _ in range(3):
        try:
            loss = engine.train_batch(x=own, labels=own * 2)
        except BuildError as err:
            return worst, str(err)
        optimizer.zero_grad()
        expected = (F.mse_loss(reference(halves[0]), halves[0] * 2) + F.mse_loss(reference(halves[1]), halves[1] * 2)) / 2
        expected.backward()
        optimizer.step()
        worst = max(worst, abs(loss.item() - expected.item()))
    engine.close()
    return worst, ""


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


REPLICAS = "replicas use different parameters, or in another order, and stage"
PARTS = "micro-batches of one step use different parameters, whose gradients stage 3 of ZeRO would lose"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("target", "zero", "among_replicas", "refusal"),
    [
        ("deepspeed", 0, True, ""),
        ("deepspeed", 1, True, REPLICAS),
        ("deepspeed", 2, True, REPLICAS),
        ("megatron", 0, True, ""),
        ("deepspeed", 1, False, ""),
        ("deepspeed", 2, False, ""),
        ("deepspeed", 3, False, PARTS),
        ("megatron", 0, False, ""),
    ],
)
def test_layers_that_only_some_use(target: str, zero: int, among_replicas: bool, refusal: str) -> None:
    for worst, message in run_distributed(either, 2, target, zero, among_replicas):
        assert worst < 2e-5
        assert message.startswith(refusal) if refusal else not message
