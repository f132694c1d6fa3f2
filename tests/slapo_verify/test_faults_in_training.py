"""Faults planted in what optimizers, gradient hooks, losses and statistics need in parallel are found and blamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_testing import run_distributed
from slapo_training.losses.reductions import ReductionTracker
from slapo_training.optimizers.probe.update_probe import UpdateDependence
from tests.slapo_torch.layouts import mesh_of

IGNORED = -100


class Net(nn.Module):
    """Two layers and the loss; the loss is a mean by hand, beside a cross entropy that is computed for a log."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)
        self.norm: nn.Module = nn.BatchNorm1d(8) if "norm" in kind else nn.Identity()
        self.is_logged = kind == "logged"
        if kind == "hook":
            self.up.weight.register_hook(first_rows_alone)
        elif kind == "marked hook":
            self.up.weight.register_hook(slapo.gradient_hook(first_rows_alone, kind="elementwise"))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.down(self.norm(self.up(x)).relu())
        if not self.is_logged:
            return F.cross_entropy(logits, labels, ignore_index=IGNORED)
        each = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
        F.cross_entropy(logits, labels, ignore_index=IGNORED)  # for a log
        return each.square().mean()


def first_rows_alone(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:4] = 0
    return gradient


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.1)


@contextmanager
def all_elementwise() -> Iterator[None]:
    """Take every optimizer for one that steps each element alone."""
    with patch("slapo_training.optimizers.whole_tensor_construction.probe", lambda optimizer: UpdateDependence()):
        yield


@contextmanager
def any_mean() -> Iterator[None]:
    """Take the first cross entropy that is computed for the loss."""

    def first(tracker: ReductionTracker, loss: torch.Tensor) -> Any:
        return tracker._losses[0][0] if tracker._losses else None

    with (
        patch.object(ReductionTracker, "reduction_of", first),
        patch("slapo_training.losses.microbatch_loss.reduction_in_graph", lambda *_, **__: None),
    ):
        yield


def _reports(rank: int) -> dict[str, tuple[bool, str]]:
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 6, generator=generator), "labels": torch.randint(5, (8,), generator=generator)}
    uneven = {**batch, "labels": batch["labels"].clone()}
    uneven["labels"][:3] = IGNORED
    found: dict[str, tuple[bool, str]] = {}

    def look(name: str, kind: str, layout: dict[str, int], rows: dict[str, torch.Tensor], **options: Any) -> None:
        mesh = mesh_of(**layout)

        def schedule(model: nn.Module) -> Any:
            sch = slapo.create_schedule(model, mesh=mesh, example_inputs=rows)
            if layout.get("tp", 1) > 1:
                sch.tensor_parallel({"up": "colwise", "down": "rowwise"})
            return sch.sync_batch_norm() if kind == "synced norm" else sch

        report = slapo.verify_engine(Net(kind), schedule, rows, **options)
        found[name] = report.ok, str(report)

    look("optimizer", "plain", {"tp": 2}, batch, optimizer=muon)
    with all_elementwise():
        look("optimizer of parts", "plain", {"tp": 2}, batch, optimizer=muon)
    look("hook", "hook", {"tp": 2}, batch)
    look("hook of parts", "marked hook", {"tp": 2}, batch)
    with any_mean():
        look("logged mean", "logged", {"tp": 2}, uneven, microbatches=2, check=False)
    look("norm of replicas", "synced norm", {"dp": 2}, batch)
    look("norm of one replica", "norm", {"dp": 2}, batch)
    look("norm of micro-batches", "synced norm", {"dp": 2}, batch, microbatches=2)
    return found


@pytest.mark.multiproc
def test_faults_of_training_are_found_and_blamed() -> None:
    first, second = run_distributed(_reports, 2, timeout=200)
    assert first == second
    for name in ("optimizer", "hook", "norm of replicas"):
        assert first[name][0], first[name][1]
    blamed = {
        "optimizer of parts": "optimizer=muon, as with SGD it is right",
        "hook of parts": "sch.tensor_parallel(",
        "logged mean": "microbatches=2, without which it is right",
        "norm of one replica": "target 'torch' is to blame",
        "norm of micro-batches": "microbatches=2, without which it is right",
    }
    for name, cause in blamed.items():
        is_same, text = first[name]
        assert not is_same, name
        assert cause in text, text
