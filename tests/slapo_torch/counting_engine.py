"""An engine whose every number tells of which step it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule

from .layouts import adamw, mesh_of

BATCH = {"x": torch.linspace(-1, 1, 32).view(4, 8), "labels": torch.linspace(1, 0, 32).view(4, 8)}


class Counts(nn.Module):
    """Two layers and a number of steps, which every weight is a multiple of after ``fill``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())

    @torch.no_grad()
    def fill(self, number: float) -> None:
        """Set every number to one."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.fill_(number)

    def numbers(self) -> set[float]:
        """All that there are."""
        return {number for tensor in (*self.parameters(), *self.buffers()) for number in tensor.flatten().tolist()}


def engine_of(width: int = 16, tp: int = 1) -> Any:
    torch.manual_seed(0)
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
    mesh = mesh_of(tp=tp) if dist.is_initialized() else None
    schedule = create_schedule(Counts(width), mesh=mesh, plugins=plugins)
    if tp > 1:
        schedule.tensor_parallel({"up": "colwise", "down": "rowwise"})
    return build(schedule, "torch", optimizer=adamw, loss_fn=nn.functional.mse_loss)
