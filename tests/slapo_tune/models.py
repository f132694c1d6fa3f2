"""A model and schedules that the processes of trials import."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from slapo_tune import ScheduleSpace


class Blocks(nn.Module):
    """Four residual blocks with a loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": nn.functional.mse_loss(x, labels)}


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4, 8), "labels": torch.zeros(4, 8)}


def layout(space: ScheduleSpace) -> None:
    space.choice("dp", [1, 2])


def schedule(sch: Any, space: ScheduleSpace) -> None:
    for block in sch.select("blocks.*")[: space.int("checkpointed", 0, 4)]:
        block.checkpoint()


class Wrong(nn.Linear):
    """A layer that computes something else, and is fast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


class Behaving(nn.Linear):
    """A layer that does what a value says: fails, takes all memory, hangs, or kills its process."""

    def __init__(self, behaviour: str) -> None:
        super().__init__(16, 8)
        self.behaviour = behaviour

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and self.behaviour == "memory":
            torch.empty(2**55)
        if not x.is_meta and self.behaviour == "raise" and os.environ["RANK"] == "1":
            raise ValueError("no such luck")
        if not x.is_meta and self.behaviour == "kill" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        if not x.is_meta and self.behaviour == "hang":
            time.sleep(600)
        return super().forward(x)


def behave(sch: Any, space: ScheduleSpace) -> None:
    behaviour = space.choice("behaviour", ["memory", "raise", "kill", "hang", "refused"])
    if behaviour == "refused":
        sch["blocks.7"].checkpoint()
    sch["blocks.0.2"].replace(Behaving(behaviour))


class LargeBlocks(Blocks):
    """Blocks of which one takes all memory, unless a schedule replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][2] = Behaving("memory")  # type: ignore[index]


def replace_large(sch: Any, space: ScheduleSpace) -> None:
    space.choice("small", [True])
    sch["blocks.0.2"].replace(nn.Linear(16, 8))


def replace_one(sch: Any, space: ScheduleSpace) -> None:
    if space.choice("wrong", [True, False]):
        sch["blocks.0.2"].replace(Wrong(16, 8))
    else:
        time.sleep(0)
