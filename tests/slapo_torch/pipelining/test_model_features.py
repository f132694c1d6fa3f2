"""Features of models with every pipeline schedule: skip connections, batch statistics, frozen parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_testing import run_distributed

from ..layouts import adamw, mesh_of

pytestmark = pytest.mark.multiproc

MICROBATCHES = 4
KINDS = (("1f1b", 1), ("interleaved", 2), ("zbv", 2))
"""Schedules, and their stages on each of two ranks."""


class UNet(nn.Module):
    """Two steps down and two up, each of which gets what its opposite had."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, 8), self._block(8, 12, stride=2)
        self.middle = self._block(12, 16, stride=2)
        self.up2, self.up1 = self._block(16 + 12, 12), self._block(12 + 8, 8)
        self.head = nn.Conv2d(8, 3, 1)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(first)
        low = self.middle(second)
        low = self.up2(torch.cat([F.interpolate(low, scale_factor=2), second], 1))
        return self.head(self.up1(torch.cat([F.interpolate(low, scale_factor=2), first], 1)))


class Normed(nn.Module):
    """A BatchNorm in each stage: of a usual momentum, of none, without parameters, without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU())
        self.c = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False), nn.ReLU())
        self.d = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, track_running_stats=False))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.d(self.c(self.b(self.a(x)))))


class Frozen(UNet):
    """Its third stage of four is frozen, as are some weights in others."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.down1[0], self.middle, self.up2[1], self.head):
            module.requires_grad_(False)


class Reentrant(UNet):
    """Two of its stages recompute in the way that gives parameters their gradients inside of a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("down2", "up2"):
            setattr(self, name, Recomputed(getattr(self, name)))


class Recomputed(nn.Module):
    """A module under a reentrant checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.module, x, use_reentrant=True)
        return result


class Case(NamedTuple):
    """A model, and where its four stages end; two end at the middle one of these."""

    model: type[nn.Module]
    ends: tuple[str, str, str]


CASES = {
    "unet": Case(UNet, ("down1", "down2", "middle")),
    "batchnorm": Case(Normed, ("a", "b", "c")),
    "reentrant": Case(Reentrant, ("down1", "down2", "middle")),
    "frozen": Case(Frozen, ("down1", "down2", "middle")),
}


def images(steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches."""
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(8, 3, 8, 8, generator=generator) for name in ("x", "labels")} for _ in range(steps)]


def built(case: Case, kind: str, per_rank: int) -> tuple[nn.Module, Schedule, Any]:
    """A copy of the unmodified model, the schedule and the engine."""
    torch.manual_seed(0)
    model = case.model()
    reference = copy.deepcopy(model)
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh_of(pp=2), example_inputs={"x": images()[0]["x"][:2]}, plugins=plugins)
    for end in case.ends if per_rank == 2 else case.ends[1:2]:
        schedule[end].cut_pipeline_stage()
    options = {"microbatches": MICROBATCHES, "pipeline_schedule": kind, "loss_fn": F.mse_loss}
    return reference, schedule, build(schedule, "torch", optimizer=adamw, **options)


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Over the micro-batches, one after the other."""
    parts = zip(batch["x"].chunk(MICROBATCHES), batch["labels"].chunk(MICROBATCHES), strict=True)
    return torch.stack([F.mse_loss(model(x), labels) for x, labels in parts]).mean()


def off(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference; what is None has to be so on both sides."""
    assert found.keys() == expected.keys()
    assert [name for name in found if (found[name] is None) != (expected[name] is None)] == []
    return max(
        (float((found[n] - value.detach()).abs().max()) for n, value in expected.items() if value is not None), default=0
    )


def _train(rank: int, name: str, path: str) -> dict[str, dict[str, float]]:
    return {kind: _beside_one_process(CASES[name], kind, per_rank, f"{path}/{kind}") for kind, per_rank in KINDS}


def _beside_one_process(case: Case, kind: str, per_rank: int, path: str) -> dict[str, float]:
    """The largest differences: of losses and gradients, of what there is after three steps, and once that is loaded again."""
    reference, schedule, engine = built(case, kind, per_rank)
    start = {name: value.clone() for name, value in schedule.full_state().items() if value is not None}
    optimizer, worst = adamw([p for p in reference.parameters() if p.requires_grad]), {"loss": 0.0, "gradient": 0.0}
    for batch in images():
        loss = engine.train_batch(**batch).item()
        optimizer.zero_grad()
        expected = mean_loss(reference, batch)
        expected.backward()
        worst["loss"] = max(worst["loss"], abs(loss - expected.item()))
        gradients = {name: p.grad for name, p in reference.named_parameters()}
        worst["gradient"] = max(worst["gradient"], off(schedule.full_state("grad"), gradients))
        optimizer.step()
    weights, buffers = dict(reference.named_parameters()), dict(reference.named_buffers())
    worst |= {"weight": off(schedule.full_state(), weights), "buffer": off(schedule.full_state("buffer"), buffers)}
    for name, parameter in reference.named_parameters():
        assert parameter.requires_grad or torch.equal(schedule.full_state()[name], start[name]), name
        assert not parameter.requires_grad or not torch.equal(parameter, start[name]), name
    engine.save(path)
    engine.close()
    _, schedule, engine = built(case, kind, per_rank)
    engine.load(path)
    worst |= {"loaded weight": off(schedule.full_state(), weights), "loaded": off(schedule.full_state("buffer"), buffers)}
    expected = mean_loss(reference.eval(), images()[0])
    worst["evaluation"] = abs(engine.eval_batch(**images()[0]).item() - expected.item())
    engine.close()
    return worst


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "reentrant")) for name in CASES])
def test_it_trains_and_is_loaded_as_in_one_process(name: str, tmp_path: Path) -> None:
    for found in run_distributed(_train, 2, name, str(tmp_path), timeout=100.0):
        wrong = {kind: worst for kind, worst in found.items() if not all(value < 1e-5 for value in worst.values())}
        assert not wrong
