"""A module around the model that takes inputs and targets and gives the loss, as torch's pipelining has them."""

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

from ..layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc


class LossWrapper(nn.Module):
    """The loss of a module's output."""

    def __init__(self, module: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.module, self.loss_fn = module, loss_fn

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.module(input), target)


def losses(rank: int, kind: str, stages: int) -> list[tuple[float, float]]:
    """Return the losses of three steps in a pipeline and in one process; some targets are ignored."""
    torch.manual_seed(0)
    model = LossWrapper(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.CrossEntropyLoss(ignore_index=7))
    plain = copy.deepcopy(model)
    x, target = torch.randn(8, 8), torch.tensor([7, 7, 7, 1, 2, 3, 4, 5])
    schedule = create_schedule(
        model,
        mesh=mesh_of(2),
        example_inputs={"input": x[:2], "target": target[:2]},
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin]),
    )
    schedule.pipeline(stages)
    engine = build(schedule, "torch", optimizer=adamw, microbatches=4, pipeline_schedule=kind)
    optimizer, found = adamw(plain.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        expected = plain(x, target)
        expected.backward()
        optimizer.step()
        found.append((engine.train_batch(input=x, target=target).item(), expected.item()))
    return found


@pytest.mark.parametrize(("kind", "stages"), [("1f1b", 2), ("zbv", 4)])
def test_it_trains_as_in_one_process(kind: str, stages: int) -> None:
    for rank in run_distributed(losses, 2, kind, stages):
        assert all(abs(found - expected) < 1e-5 for found, expected in rank), rank
