"""Modules without layers of their own, or with torch's own attention, and attention whose heads are not equal parts of a layer.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


class MatmulMlp(nn.Module):
    """Parameters in ``@`` and in ``F.linear``."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1, self.w2 = weight(D, 4 * D), nn.Parameter(torch.zeros(4 * D)), weight(D, 4 * D)

    def forward(self, x):
        return F.linear(F.gelu(x @ self.w1 + self.b1), self.w2)


class EinsumAttention(nn.Module):
    """Parameters with a dimension for heads, in einsums."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (weight(D, H, D // H) for _ in range(3))
        self.wo = weight(H, D // H, D)

    def forward(self, x):
        q, k, v = (torch.einsum("bnd,dhe->bhne", x, w) for w in (self.wq, self.wk, self.wv))
        return torch.einsum("bhne,hed->bnd", F.scaled_dot_product_attention(q, k, v), self.wo)


class BatchedExperts(nn.Module):
    """Every token goes to all experts, by ``torch.bmm``."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 4), weight(4, D, 2 * D), weight(4, 2 * D, D)

    def forward(self, x):
        flat = x.reshape(1, -1, D).expand(4, -1, -1)
        out = torch.bmm(F.gelu(torch.bmm(flat, self.up)), self.down)
        return torch.einsum("en,end->nd", self.gate(x).softmax(-1).flatten(0, 1).T, out).view_as(x)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, D // H, bias=False) for _ in range(3))

    def forward(self, x):
        weights = (self.query(x) @ self.key(x).mT * (D // H) ** -0.5).softmax(-1)
        return weights @ self.value(x)


class ListOfHeads(nn.Module):
    """A module for each head."""

    def __init__(self):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head() for _ in range(H)), nn.Linear(D, D)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class OneKey(nn.Module):
    """One head of keys for all queries."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o, self.heads = nn.Linear(D, D), nn.Linear(D, 2 * D // H), nn.Linear(D, D), H

    def forward(self, x):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = (each.unsqueeze(1).expand(-1, self.heads, -1, -1) for each in self.kv(x).chunk(2, dim=-1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class NormOverHeads(nn.Module):
    """Norms of queries and keys over all heads at once."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.q_norm, self.k_norm, self.heads = nn.LayerNorm(D), nn.LayerNorm(D), H

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class ConvMlp(nn.Module):
    """An MLP of convolutions, as VITS and Conformer have it."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(D, 4 * D, 3, padding=1), nn.Conv1d(4 * D, D, 1)

    def forward(self, x):
        return self.conv2(torch.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)


WHOLE = (MatmulMlp, EinsumAttention, BatchedExperts, ListOfHeads, OneKey, NormOverHeads, ConvMlp)
