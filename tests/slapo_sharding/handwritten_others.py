"""Attention whose heads are not equal parts of a layer, or that changes modes of torch.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.slapo_sharding.handwritten_projections import D, H


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, D // H, bias=False) for _ in range(3))

    def forward(self, x):
        weights = (self.query(x) @ self.key(x).mT * (D // H) ** -0.5).softmax(-1)
        return weights @ self.value(x)


class ThreeHeads(nn.Module):
    """A module for each head, of a number that the ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head() for _ in range(3)), nn.Linear(3 * D // H, D)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class LoopedHeads(nn.Module):
    """Parameters with a dimension for heads, which a loop takes one by one."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(H, D, D // H) * 0.3) for _ in range(3))

    def forward(self, x):
        q, k, v = ([x @ w[head] for head in range(H)] for w in (self.wq, self.wk, self.wv))
        return torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)], dim=-1)


class ScoresInFloat32(nn.Module):
    """Attention that builds its mask without gradients, and whose scores no autocast makes less exact."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.scale = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Parameter(torch.linspace(0.5, 1.5, H).view(H, 1, 1)),
        )

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (each.view(b, n, H, c // H).transpose(1, 2) for each in self.qkv(x).split(c, dim=2))
        with torch.no_grad():
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
        with torch.autocast("cpu", enabled=False):
            scores = (q @ k.mT).float() * self.scale
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.proj((weights.to(v.dtype) @ v).transpose(1, 2).reshape(b, n, c))


MODES = (ScoresInFloat32,)
WHOLE = (LoopedHeads, ThreeHeads)
