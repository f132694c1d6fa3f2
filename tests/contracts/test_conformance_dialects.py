"""Every dialect of ours passes the conformance kit that authors of plugins are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Registry, Schedule
from slapo_testing.conformance import Check, EngineExample, RefusedOption, dialect_checks


class Regression(nn.Module):
    """Gives its loss where it has labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.down(F.relu(self.up(x)))
        return {"y": y} if labels is None else {"loss": F.mse_loss(y, labels), "y": y}


class Features(nn.Linear):
    """Gives no loss."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, labels)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=generator), "labels": torch.randn(8, 8, generator=generator)}


def cut_behind_up(sch: Schedule) -> None:
    sch["up"].cut_pipeline_stage()


def split(sch: Schedule) -> None:
    sch.tensor_parallel({"up": "colwise", "down": "rowwise"})


WRONG = (RefusedOption("microbatches", {"microbatches": 0}), RefusedOption("clip", {"clip": -1.0}))
DIALECTS: dict[str, list[EngineExample]] = {
    name: [
        EngineExample(Regression, batch, {"microbatches": 2}, refused=WRONG),
        EngineExample(Regression, batch, {"microbatches": 2}, mesh={"dp": 2}),
        EngineExample(Regression, batch, {"microbatches": 2}, mesh={"pp": 2}, before=cut_behind_up),
        EngineExample(Regression, batch, mesh={"tp": 2}, before=split),
        EngineExample(Features, batch, loss_fn=error, name="with a loss function"),
    ]
    for name in ("deepspeed", "megatron", "torch")
}


def parameters() -> list[Any]:
    """Checks of all dialects; those that start processes are marked slow."""
    found = []
    for name, examples in DIALECTS.items():
        for check in dialect_checks(name, examples):
            marks = [] if check.example is None else [pytest.mark.multiproc, pytest.mark.slow]
            found.append(pytest.param(check, marks=marks, id=str(check)))
    return found


@pytest.mark.parametrize("check", parameters())
def test_our_dialects_conform(check: Check) -> None:
    check()


def test_no_dialect_is_missing() -> None:
    assert sorted(DIALECTS) == Registry().names("dialect")
