"""Layers before a cut are frozen and unfrozen between steps; gradients across the boundary are planned again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed

from ..layouts import mesh_of

pytestmark = pytest.mark.multiproc

STEPS = ([], [0], [0], [], [1])
"""Per step the layers that are frozen on all ranks."""


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step)).unbind()


def freeze(model: nn.Module, frozen: list[int]) -> None:
    for index, layer in enumerate(model.children()):
        layer.requires_grad_(index not in frozen)


def differences(rank: int, kind: str, per_rank: int) -> list[float]:
    """Return differences of losses from those in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 * per_rank)))
    plain = copy.deepcopy(model)
    schedule = create_schedule(
        model,
        mesh=mesh_of(2),
        example_inputs={"input": data(0)[0][:2]},
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin]),
    )
    schedule.pipeline(2 * per_rank)
    made = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    engine = build(schedule, "torch", optimizer=made, loss_fn=nn.functional.mse_loss, microbatches=2, pipeline_schedule=kind)
    optimizer = made(plain.parameters())
    found = []
    for step, frozen in enumerate(STEPS):
        freeze(model, frozen)
        freeze(plain, frozen)
        x, y = data(step)
        optimizer.zero_grad()
        expected = nn.functional.mse_loss(plain(x), y)
        expected.backward()
        optimizer.step()
        found.append(abs(engine.train_batch(input=x, labels=y).item() - expected.item()))
    return found


@pytest.mark.parametrize(("kind", "per_rank"), [("1f1b", 1), ("zbv", 2)])
def test_losses_are_those_of_one_process(kind: str, per_rank: int) -> None:
    for found in run_distributed(differences, 2, kind, per_rank):
        assert max(found) < 1e-6, found
