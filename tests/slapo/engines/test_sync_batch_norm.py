"""A ResNet with synced BatchNorms on the engines, compared with the unmodified model on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, create_schedule
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc
ROWS, STEPS = 8, 3


class Block(nn.Module):
    """A residual block; the first of a stage widens."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width, momentum=None)
        self.down = nn.Conv2d(before, width, 1) if before != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    """A small one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Block(8, 8), Block(8, 16), Block(16, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(torch.relu(self.bn(self.stem(x)))).mean((2, 3)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(ROWS, 3, 6, 6) * 3 + 5, torch.randint(0, 10, (ROWS,))) for _ in range(STEPS)]


def reference(model: nn.Module, parts: int) -> list[float]:
    """Losses of the whole batch in one process; with several parts, those that the replicas' micro-batches are together."""
    optimizer, losses = sgd(model.parameters()), []
    for x, labels in batches():
        optimizer.zero_grad()
        rows = torch.arange(ROWS).view(2, parts, -1).transpose(0, 1).reshape(parts, -1)  # for two replicas
        found = [nn.functional.cross_entropy(model(x[part]), labels[part]) / parts for part in rows]
        sum(found[1:], found[0]).backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in found))
    return losses


def difference(target: str, sizes: tuple[int, int], options: dict[str, Any]) -> float:
    """Largest one to the reference, of the losses of all steps and of this rank's weights and buffers behind them."""
    options, parts = dict(options), options.get("microbatches", 1)
    torch.manual_seed(0)
    model = ResNet()
    whole = copy.deepcopy(model)
    losses = reference(whole, parts)
    rank, (pp, dp) = torch.distributed.get_rank(), sizes
    mesh = None if options.pop("no_mesh", False) else init_device_mesh("cpu", (pp, dp, 1), mesh_dim_names=("pp", "dp", "tp"))
    replica, rows = (rank % dp), ROWS // dp
    sch = create_schedule(model, mesh=mesh, example_inputs=(torch.zeros(rows // parts, 3, 6, 6),))
    if options.pop("recompute", False):
        sch["layers.0"].checkpoint()
    sch.sync_batch_norm()
    if pp > 1:
        sch["layers.0"].cut_pipeline_stage()
    engine = build(sch, target, optimizer=sgd, loss_fn=nn.functional.cross_entropy, **options)
    mine, worst = slice(replica * rows, replica * rows + rows), 0.0
    for (x, labels), expected in zip(batches(), losses, strict=True):
        worst = max(worst, abs(engine.train_batch(x=x[mine], labels=labels[mine]).item() - expected))
    state, count = whole.state_dict(), 0
    for name, piece in engine.pieces().items():
        if piece.tensor.shape == state[name].shape:  # replicas of FSDP have rows of the others
            worst = max(worst, (piece.tensor.double() - state[name].double()).abs().max().item())
            count += 1
    assert count > 10
    engine.close()
    return worst


PAIR: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("torch", (1, 2), {}),
    ("torch", (1, 2), {"microbatches": 2}),
    ("torch", (1, 2), {"data_parallel": "fsdp"}),
    ("torch", (1, 2), {"recompute": True}),
    ("torch", (1, 2), {"no_mesh": True}),
    ("deepspeed", (1, 2), {}),
]
MORE: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("deepspeed", (1, 2), {"config": {"zero_optimization": {"stage": 1}}}),
    ("deepspeed", (1, 2), {"recompute": True}),
    ("megatron", (1, 2), {}),
]
FOUR: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("torch", (1, 4), {}),
    *(
        (target, (2, 2), {"microbatches": 2, **more})
        for target in ("torch", "deepspeed", "megatron")
        for more in ({}, {"recompute": True})
    ),
]


def differences(rank: int, cases: list[tuple[str, tuple[int, int], dict[str, Any]]]) -> list[float]:
    return [difference(*case) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, PAIR), pytest.param(2, MORE, marks=pytest.mark.slow), pytest.param(4, FOUR, marks=pytest.mark.slow)],
)
def test_a_resnet_trains_as_on_the_whole_batch(ranks: int, cases: Any) -> None:
    for found in run_distributed(differences, ranks, cases, timeout=110):
        assert {str(case): error for case, error in zip(cases, found, strict=True) if error > 3e-6} == {}
