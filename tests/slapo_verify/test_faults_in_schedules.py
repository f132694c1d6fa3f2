"""``verify`` finds what a schedule does to updates, gradient hooks, injected gradients, losses and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_verify import Report, run_as_threads, verify
from tests.slapo.gradient_injection import Attach


class Routed(nn.Module):
    """Two projections, before which the balance loss of a router injects its gradient."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.router, self.up, self.down, self.times = nn.Linear(6, 4), nn.Linear(6, 8), nn.Linear(8, 6), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = Attach.apply(x, self.router(x).softmax(-1).square().sum())
        return self.down(self.up(x).relu())


class Contrasted(nn.Module):
    """Cross entropy over the pairs of all rows, or the mean of those over parts of the rows."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        pairs = zip(one.chunk(self.parts), other.chunk(self.parts), strict=True)
        return torch.stack([F.cross_entropy(a @ b.T, torch.arange(len(a))) for a, b in pairs]).mean()


class Normed(nn.BatchNorm1d):
    """Takes its statistics of each half of the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Normed, self).forward(half) for half in x.chunk(2)])


class Chosen(nn.Module):
    """Return one of two losses for the one to differentiate, and the other to be logged."""

    def __init__(self, place: int = 0) -> None:
        super().__init__()
        self.place = place

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.zeros(len(logits), dtype=torch.long)
        losses = F.cross_entropy(logits, labels, label_smoothing=0.5), F.cross_entropy(logits, labels)
        return losses[self.place], losses[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.norm, self.head = nn.Linear(6, 6), Routed(), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.pairs, self.losses = Contrasted(), Chosen()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(self.block(self.first(x)))
        loss, logged = self.losses(self.head(h))
        return {"loss": loss + self.pairs(h, x), "logged": logged}


def with_hook(model: nn.Module, kind: str) -> nn.Module:
    hook: Any = slapo.gradient_hook(without_first_rows, kind="elementwise") if kind == "marked" else without_first_rows
    model.get_parameter("block.up.weight").register_hook(hook)
    return model


def without_first_rows(gradient: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(gradient[:4]), gradient[4:]])


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.1)


def split(sch: Any, at: str = "block.up") -> None:
    """Shard the two projections, with the gradient of the input summed ``at`` a module."""
    sch["block.up"].shard(["weight", "bias"], axis=0)
    sch[at].sync("bwd_post", "all_reduce")
    sch["block.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def _replaced(path: str, module: nn.Module) -> Callable[[Any], None]:
    def schedule(sch: Any) -> None:
        sch[path].replace(copy.deepcopy(module))

    return schedule


def _normed(sch: Any) -> None:
    made = Normed(6)
    made.load_state_dict(sch["norm"].mod.state_dict())
    sch["norm"].replace(made)


def _routed(sch: Any) -> None:
    made = Routed(times=2)
    made.load_state_dict(sch["block"].mod.state_dict())
    sch["block"].replace(made)


def _synced(sch: Any) -> None:
    sch.sync_batch_norm()


RIGHT: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "split": (split, {}),
    "hook of the whole gradient": (split, {"hook": "unmarked"}),
    "optimizer of elements": (split, {"level": "step", "optimizer": torch.optim.AdamW}),
    "statistics of all rows": (_synced, {"eval_mode": False}),
}
WRONG: dict[str, tuple[Callable[[Any], None], dict[str, Any], str]] = {
    "optimizer of whole tensors": (split, {"level": "step", "optimizer": muon}, "update of an element depend on others"),
    "hook of a part": (split, {"hook": "marked"}, "sch['block.up'].shard("),
    "injected gradient summed over ranks": (lambda sch: split(sch, "block"), {}, "sch['block'].sync("),
    "injected gradient twice": (_routed, {}, "sch['block'].replace("),
    "loss over parts of the rows": (_replaced("pairs", Contrasted(2)), {}, "sch['pairs'].replace("),
    "logged loss for the loss": (_replaced("losses", Chosen(1)), {}, "sch['losses'].replace("),
    "statistics of parts of the rows": (_normed, {"eval_mode": False}, "sch['norm'].replace("),
}


def _report(schedule: Callable[[Any], None], hook: str | None = None, **options: Any) -> Report:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def model() -> nn.Module:
        return with_hook(Net(), hook) if hook else Net()

    sch = slapo.create_schedule(model(), group=dist.group.WORLD, example_inputs=x)
    schedule(sch)
    return verify(model(), sch, **options)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name: str) -> None:
    schedule, options = RIGHT[name]
    for report in run_as_threads(lambda: _report(schedule, **options), 2):
        assert report.ok, report


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_found_and_blamed_on_all_ranks(name: str) -> None:
    schedule, options, blamed = WRONG[name]
    one, other = run_as_threads(lambda: _report(schedule, **options), 2)
    assert one == other
    assert not one.ok
    assert blamed in str(one.blame), one
