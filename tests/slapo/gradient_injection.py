"""Models that inject gradients into their backward, in the ways that are in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LABELS = 8, 5


class Attach(torch.autograd.Function):
    """Hands on a tensor; in the backward an auxiliary loss gets a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(aux)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.ones_like(ctx.saved_tensors[0])


class Scaler(torch.autograd.Function):
    """As Megatron's: the gradient is a number that is kept with the class."""

    scale = torch.tensor(0.5)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(aux)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.ones_like(ctx.saved_tensors[0]) * Scaler.scale


class Penalised(torch.autograd.Function):
    """Adds the gradient of a penalty on what it hands on, which it computes by hand: of a mean over rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad + 0.5 * x / len(x)


def _hooked(x: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """A hook on an activation that adds the gradient of a penalty."""
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda grad: grad + 0.5 * x.detach() / len(x))
    return x


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "attached": Attach.apply,
    "scaled by the class": Scaler.apply,
    "penalty": lambda x, aux: Penalised.apply(x),
    "hook": _hooked,
}


class Routed(nn.Module):
    """A gate over four experts, whose balance loss is a mean over rows."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, 4 * WIDTH)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = self.gate(x).softmax(-1)
        out = torch.einsum("bsew,bse->bsw", self.experts(x).unflatten(-1, (4, WIDTH)).tanh(), probs)
        aux = 2 * (probs.mean(1).square().sum(-1)).mean()
        return x + (out if self.way is None else WAYS[self.way](out, aux))


class Net(nn.Module):
    """Some blocks, of which those that are named inject; a cross entropy over labels, of which some may be ignored."""

    def __init__(self, way: str, injecting: tuple[int, ...] = (0, 1, 2, 3), recompute: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, LABELS)
        self.blocks = nn.ModuleList(Routed(way if index in injecting else None) for index in range(4))
        self.recompute = recompute

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batches(rows: int = 16, ignores: bool = False) -> list[dict[str, torch.Tensor]]:
    """Three batches of all replicas."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(3):
        labels = torch.randint(LABELS, (rows, 6), generator=generator)
        if ignores:
            labels[: rows // 2, 2 + step :] = -100
            labels[rows // 2 + 1, :5] = -100
            labels[rows // 4 : rows // 2] = -100  # a micro-batch of none
        found.append({"x": torch.randn(rows, 6, 6, generator=generator), "labels": labels})
    return found
