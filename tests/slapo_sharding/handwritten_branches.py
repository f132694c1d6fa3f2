"""Attention whose heads are modules in a list, or layers in lists, and other branches whose results are put together.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H

_SIZE = D // H


class Head(nn.Module):
    """One head, as in Karpathy's lecture."""

    def __init__(self, width=D):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, _SIZE, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(32, 32).tril())

    def forward(self, x):
        _, T, C = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * C**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class ListOfHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(H)])
        self.proj = nn.Linear(D, D)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class IndexedHeads(ListOfHeads):
    """The same by number, with a gate of the input for each head."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(D, _SIZE) for _ in range(H))

    def forward(self, x):
        found = []
        for i in range(len(self.heads)):
            found.append(self.heads[i](x) * self.gates[i](x).sigmoid())
        return self.proj(torch.cat(found, 2))


class StackedHeads(ListOfHeads):
    def forward(self, x):
        b, n, _ = x.shape
        return self.proj(torch.stack([h(x) for h in self.heads], dim=2).reshape(b, n, -1))


class SlicedHeads(nn.Module):
    """Lists of projections, each head of its own slice of the width, as in tutorials of vision transformers."""

    def __init__(self):
        super().__init__()
        self.q_mappings, self.k_mappings, self.v_mappings = (
            nn.ModuleList([nn.Linear(_SIZE, _SIZE) for _ in range(H)]) for _ in range(3)
        )
        self.out = nn.Linear(D, D)

    def forward(self, x):
        result = []
        for head in range(H):
            seq = x[..., head * _SIZE : (head + 1) * _SIZE]
            q, k, v = self.q_mappings[head](seq), self.k_mappings[head](seq), self.v_mappings[head](seq)
            result.append(torch.softmax(q @ k.mT / _SIZE**0.5, dim=-1) @ v)
        return self.out(torch.cat(result, -1))


class ChunkedHeads(nn.Module):
    """Each head gets its chunk of the input."""

    def __init__(self):
        super().__init__()
        self.heads, self.o = nn.ModuleList(Head(_SIZE) for _ in range(H)), nn.Linear(D, D)

    def forward(self, x):
        return self.o(torch.cat([h(part) for h, part in zip(self.heads, x.chunk(H, -1), strict=True)], -1))


class CrossHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.temperature = nn.LayerNorm(D), nn.Parameter(torch.full((1,), 0.7))
        self.q, self.kv = nn.Linear(D, _SIZE), nn.Linear(D, 2 * _SIZE)

    def forward(self, x, context):
        k, v = self.kv(self.norm(context)).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(self.q(x) * self.temperature, k, v)


class CrossHeads(nn.Module):
    """Heads with a norm and a temperature each, that look at something else."""

    def __init__(self):
        super().__init__()
        self.context, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.heads = nn.ModuleList(CrossHead() for _ in range(H))

    def forward(self, x):
        context = self.context(x).tanh()
        return self.o(torch.cat([h(x, context) for h in self.heads], dim=-1))


class SharedNormHeads(nn.Module):
    """One norm and one scale for the queries of all heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(D, _SIZE) for _ in range(H)) for _ in range(3))
        self.norm, self.scale, self.o = nn.LayerNorm(_SIZE), nn.Parameter(torch.ones(_SIZE)), nn.Linear(D, D)

    def forward(self, x):
        heads = zip(self.q, self.k, self.v, strict=True)
        found = [F.scaled_dot_product_attention(self.norm(q(x)) * self.scale, k(x), v(x)) for q, k, v in heads]
        return self.o(torch.cat(found, dim=-1))


class ParameterHeads(nn.Module):
    """Matrices in lists of parameters."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.ParameterList(torch.randn(D, _SIZE) * 0.2 for _ in range(H)) for _ in range(3))
        self.wo = nn.Linear(D, D)

    def forward(self, x):
        weights = zip(self.wq, self.wk, self.wv, strict=True)
        return self.wo(torch.cat([F.scaled_dot_product_attention(x @ q, x @ k, x @ v) for q, k, v in weights], -1))


class TextConvolutions(nn.Module):
    """Convolutions of several widths side by side, as in TextCNN and Inception."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(D, D, 2 * size + 1, padding=size) for size in range(4))
        self.fc = nn.Linear(4 * D, D)

    def forward(self, x):
        return self.fc(torch.cat([F.relu(conv(x.mT)) for conv in self.convs], dim=1).mT)


BRANCHES = (
    *(ListOfHeads, IndexedHeads, StackedHeads, SlicedHeads, ChunkedHeads, CrossHeads, SharedNormHeads, ParameterHeads),
    TextConvolutions,
)
