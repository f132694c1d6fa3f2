"""Attention with modules that have two names, and with what it keeps: masks and tables for the next call, and maps.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from einops.layers.torch import Rearrange
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H, OneEach, SplitByWidth


class MakeHeads(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, x):
        b, n, c = x.shape
        return x.view(b, n, self.heads, c // self.heads).transpose(1, 2)


class SplitterTwice(OneEach):
    """One module makes heads of the queries, and under another name those of a gate, as in x-transformers."""

    def __init__(self, splitter=MakeHeads):
        super().__init__()
        self.gate, self.to_heads = nn.Linear(D, D, bias=False), splitter(H)
        self.gate_to_heads = self.to_heads

    def forward(self, x):
        q, k, v = (self.to_heads(layer(x)) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v) * self.gate_to_heads(self.gate(x)).sigmoid()
        return self.o(out.transpose(1, 2).flatten(2))


class RearrangeTwice(SplitterTwice):
    """The same with a layer of einops."""

    def __init__(self):
        super().__init__(lambda heads: Rearrange("b n (h d) -> b h n d", h=heads))


class OneNorm(OneEach):
    """One norm for the heads of queries and keys, in a module around it."""

    def __init__(self):
        super().__init__()
        self.q_norm = nn.Sequential(nn.LayerNorm(D // H))
        self.k_norm = self.q_norm

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (layer(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).reshape(b, n, c))


class CachedMask(OneEach):
    """A mask and a table of positions that are made once and then sliced, as in lucidrains' code."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("table", None, persistent=False)

    def get_mask(self, n, device):
        if self.mask is not None and self.mask.shape[-1] >= n:
            return self.mask[:n, :n]
        mask = torch.ones((n, n), device=device, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        return mask

    def get_table(self, n, size, device):
        if self.table is not None and self.table.shape[0] >= n:
            return self.table[:n]
        steps = torch.arange(n, device=device)[:, None] * 10.0 ** -torch.arange(0, size, device=device)
        self.register_buffer("table", steps.cos(), persistent=False)
        return self.table

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (layer(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (each * self.get_table(n, c // self.heads, x.device) for each in (q, k))
        scores = (q @ k.mT).masked_fill(self.get_mask(n, x.device), -torch.finfo(q.dtype).max)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class KeepsMap(SplitByWidth):
    """Keeps its weights for plots, the length, and a table with the length that it was made for."""

    def __init__(self):
        super().__init__()
        self.length = self.attn_map = None

    def forward(self, x):
        b, n, c = x.shape
        if self.length != n:
            self.length, self.table = n, torch.arange(n, device=x.device)[:, None].mul(torch.ones(c // self.n_head)).cos()
        q, k, v = (each.view(b, n, self.n_head, c // self.n_head).transpose(1, 2) for each in self.c_attn(x).split(c, dim=2))
        self.attn_map = (q * self.table @ k.mT).softmax(-1)
        self.last = {"mean": x.mean(), "queries": q.detach(), "tokens": b * n}
        return self.c_proj((self.attn_map @ v).transpose(1, 2).reshape(b, n, c))


REUSED = (SplitterTwice, RearrangeTwice, OneNorm, CachedMask, KeepsMap)
"""All of these can be split on 2 ranks and on 4."""
