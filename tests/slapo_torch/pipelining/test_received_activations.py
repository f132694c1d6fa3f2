"""Received activations are new tensors in every step: hooks on them, hooks within the stage, and kept tensors."""

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

STEPS = 4


class Halving(nn.Module):
    """Halves the gradient of its input by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return self.inner(x)


class HalvingInside(nn.Module):
    """Halves the gradient of a value that its layer gives, and so of that layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return self.last(torch.tanh(y))


class Keeping(nn.Module):
    """Keeps its input for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.kept = self.kept, x.detach()
        return self.inner(x + before)


def differences(rank: int, kind: type[nn.Module], schedule: str, per_rank: int, parts: int) -> list[float]:
    """Return differences of losses from those in one process, by micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), kind(), nn.Tanh()) for _ in range(2 * per_rank)))
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, 4, 8).unbind()
    sch = create_schedule(
        model,
        mesh=mesh_of(2),
        example_inputs={"input": x.chunk(parts)[0]},
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin]),
    )
    for stage in range(1, 2 * per_rank):
        sch[f"{stage}.0"].cut_pipeline_stage()  # the next stage begins with what keeps or halves
    made = lambda parameters: torch.optim.SGD(parameters, lr=0.2)  # noqa: E731
    engine = build(sch, "torch", optimizer=made, loss_fn=nn.functional.mse_loss, microbatches=parts, pipeline_schedule=schedule)
    optimizer, found = made(plain.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        pairs = zip(x.chunk(parts), y.chunk(parts), strict=True)
        losses = [nn.functional.mse_loss(plain(part), target) / parts for part, target in pairs]
        torch.stack(losses).sum().backward()
        optimizer.step()
        found.append(abs(engine.train_batch(input=x, labels=y).item() - sum(loss.item() for loss in losses)))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "schedule", "per_rank", "parts"),
    [
        (Halving, "1f1b", 1, 2),
        (Halving, "gpipe", 1, 2),
        (Halving, "interleaved", 2, 2),
        (Keeping, "gpipe", 1, 1),
        (HalvingInside, "zero_bubble", 2, 2),
        (HalvingInside, "zbv", 2, 2),
        (HalvingInside, "dualpipev", 2, 4),
    ],
)
def test_losses_are_those_of_one_process(kind: type[nn.Module], schedule: str, per_rank: int, parts: int) -> None:
    for found in run_distributed(differences, 2, kind, schedule, per_rank, parts):
        assert max(found) < 1e-6, found
