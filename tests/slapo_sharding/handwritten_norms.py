"""Norms over the whole width of what heads or hidden units are made of.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H


class Rms(nn.Module):
    """An RMS norm of one's own, with statistics in float32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * h).to(x.dtype)


class Standard(nn.Module):
    """A LayerNorm of one's own."""

    def __init__(self, width):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.linspace(0.5, 1.5, width)), nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.g + self.b


class OfFunction(nn.Module):
    """A norm by a function, with a parameter of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class NormOverHeads(nn.Module):
    """Norms of queries and keys over all heads at once, as OLMo 2 has them."""

    kind: Callable[[int], nn.Module] = nn.LayerNorm

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.q_norm, self.k_norm, self.heads = type(self).kind(D), type(self).kind(D), H

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class RmsOverHeads(NormOverHeads):
    kind = Rms


class TorchRmsOverHeads(NormOverHeads):
    kind = nn.RMSNorm


class StandardOverHeads(NormOverHeads):
    kind = Standard


class FunctionOverHeads(NormOverHeads):
    kind = OfFunction


class NormOverGroups(nn.Module):
    """Norms over all queries and over the fewer keys, out of one projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.q_norm, self.k_norm = nn.Linear(D, 2 * D), nn.Linear(D, D), nn.RMSNorm(D), nn.RMSNorm(D // 2)
        self.heads, self.kv = 8, 4

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).split([c, c // 2, c // 2], dim=-1)
        q, k = self.q_norm(q).view(b, n, self.heads, -1).transpose(1, 2), self.k_norm(k).view(b, n, self.kv, -1).transpose(1, 2)
        v = v.view(b, n, self.kv, -1).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(b, n, c))


class NormInMlp(nn.Module):
    """A norm over the hidden width, and one over the attention's output before its projection."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 4 * D), nn.LayerNorm(4 * D, elementwise_affine=False), nn.Linear(4 * D, D)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))


NORMS = (
    *(NormOverHeads, RmsOverHeads, TorchRmsOverHeads, StandardOverHeads, FunctionOverHeads),
    *(NormOverGroups, NormInMlp),
)
"""All of these can be split on 2 ranks and on 4."""
