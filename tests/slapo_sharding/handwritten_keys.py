"""Attention with one key head for all queries, or fewer than there are ranks.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H


class OneKey(nn.Module):
    """One head of keys, expanded for all queries."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o, self.heads = nn.Linear(D, D), nn.Linear(D, 2 * D // H), nn.Linear(D, D), H

    def forward(self, x):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = (each.unsqueeze(1).expand(-1, self.heads, -1, -1) for each in self.kv(x).chunk(2, dim=-1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class OneKeyEach(nn.Module):
    """A layer for the keys and one for the values, which products repeat themselves."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj, self.head_dim = nn.Linear(D, D, bias=False), nn.Linear(D, D), D // H
        self.k_proj, self.v_proj = nn.Linear(D, D // H), nn.Linear(D, D // H)

    def forward(self, x):
        b, n, c = x.shape
        q = self.q_proj(x).view(b, n, -1, self.head_dim).transpose(1, 2)
        k, v = self.k_proj(x).unsqueeze(1), self.v_proj(x).unsqueeze(1)
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class OneKeyEinsum(nn.Module):
    """Einsums over heads of the queries alone, with a norm of the keys, as in lucidrains' PaLM."""

    def __init__(self):
        super().__init__()
        self.heads, self.scale = H, (D // H) ** -0.5
        self.to_q, self.to_kv, self.to_out = (nn.Linear(D, each, bias=False) for each in (D, 2 * D // H, D))
        self.k_norm = nn.LayerNorm(D // H)

    def forward(self, x):
        b, n, _ = x.shape
        q, (k, v) = self.to_q(x).view(b, n, self.heads, -1).transpose(1, 2), self.to_kv(x).chunk(2, dim=-1)
        scores = torch.einsum("b h i d, b j d -> b h i j", q * self.scale, self.k_norm(k))
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.finfo(scores.dtype).max)
        out = torch.einsum("b h i j, b j d -> b h i d", scores.softmax(-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class OneKeyRepeated(OneKeyEach):
    """One key head by ``repeat_interleave``, with a grouped view."""

    def forward(self, x):
        b, n, c = x.shape
        h = c // self.head_dim
        q = self.q_proj(x).view(b, n, h, self.head_dim).transpose(1, 2)
        k, v = (p(x).view(b, n, 1, self.head_dim).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        k, v = k.repeat_interleave(h, dim=1), v.repeat(1, h, 1, 1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c))


class OneKeyParameters(nn.Module):
    """The same of parameters."""

    def __init__(self):
        super().__init__()
        self.wq, self.wo = (nn.Parameter(torch.randn(D, D) * D**-0.5) for _ in range(2))
        self.wk, self.wv = (nn.Parameter(torch.randn(D, D // H) * D**-0.5) for _ in range(2))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (x @ self.wq).view(b, n, H, c // H), x @ self.wk, x @ self.wv
        weights = (torch.einsum("bihd,bjd->bhij", q, k) * (c // H) ** -0.5).softmax(-1)
        return torch.einsum("bhij,bjd->bihd", weights, v).reshape(b, n, c) @ self.wo


class FusedOneKey(nn.Module):
    """One layer for all queries and one head of keys and values, as in StarCoder and PaLM; the keys have a norm and a scale."""

    def __init__(self):
        super().__init__()
        self.heads, self.size = H, D // H
        self.qkv, self.out = nn.Linear(D, D + 2 * self.size), nn.Linear(D, D)
        self.k_norm, self.scale = nn.LayerNorm(self.size), nn.Parameter(torch.rand(self.size))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).split([c, self.size, self.size], dim=-1)
        q, k = q.view(b, n, self.heads, self.size).transpose(1, 2), self.k_norm(k) * self.scale
        scores = q @ k.unsqueeze(1).transpose(-2, -1) * self.size**-0.5
        return self.out((scores.softmax(-1) @ v.unsqueeze(1)).transpose(1, 2).reshape(b, n, c))


class FusedOneKeyKernel(nn.Module):
    """The same by torch's kernel, which repeats the keys; keys and values are one part that is chunked."""

    def __init__(self):
        super().__init__()
        self.heads, self.size = H, D // H
        self.qkv, self.out = nn.Linear(D, D + 2 * self.size, bias=False), nn.Linear(D, D)

    def forward(self, x):
        b, n, c = x.shape
        q, kv = torch.split(self.qkv(x), (self.heads * self.size, 2 * self.size), dim=-1)
        q, (k, v) = q.view(b, n, -1, self.size).transpose(1, 2), (each[:, None] for each in kv.chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FusedFewKeys(nn.Module):
    """One layer for all queries and two heads of keys and values, which are repeated."""

    def __init__(self):
        super().__init__()
        self.heads, self.keys, self.size = H, 2, D // H
        self.qkv, self.out = nn.Linear(D, D + 2 * self.keys * self.size), nn.Linear(D, D)

    def forward(self, x):
        b, n, c = x.shape
        widths = [self.heads * self.size, self.keys * self.size, self.keys * self.size]
        q, k, v = (each.view(b, n, -1, self.size).transpose(1, 2) for each in self.qkv(x).split(widths, dim=-1))
        k, v = (each.repeat_interleave(self.heads // self.keys, dim=1) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class FusedWithGate(nn.Module):
    """One layer for the attention, of one key head, and for a gated MLP beside it, as in lucidrains' PaLM."""

    def __init__(self):
        super().__init__()
        self.heads, self.widths = H, (D, D // H, D // H, 4 * D)
        self.fused = nn.Linear(D, sum(self.widths), bias=False)
        self.attn_out, self.ff_out = nn.Linear(D, D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v, ff = self.fused(x).split(self.widths, dim=-1)
        q = q.view(b, n, self.heads, -1).permute(0, 2, 1, 3)
        scores = torch.einsum("b h i d, b j d -> b h i j", q, k) * (D // H) ** -0.5
        out = torch.einsum("b h i j, b j d -> b h i d", scores.softmax(-1), v)
        up, gate = ff.chunk(2, dim=-1)
        return self.attn_out(out.permute(0, 2, 1, 3).reshape(b, n, -1)) + self.ff_out(F.silu(gate) * up)


class FusedSlices(nn.Module):
    """One layer for all queries and one head of keys and values, which are sliced out from the front and from the back."""

    def __init__(self):
        super().__init__()
        self.heads, self.size = H, D // H
        self.qkv, self.out = nn.Linear(D, D + 2 * self.size), nn.Linear(D, D)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv[..., :c], qkv[..., c : c + self.size], qkv[..., -self.size :]
        q = q.reshape(b, n, self.heads, self.size).transpose(1, 2)
        k, v = (each.reshape(b, n, 1, self.size).transpose(1, 2).expand(b, self.heads, n, self.size) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class FusedHeads(nn.Module):
    """One layer for heads of queries, keys and values, a dimension of their own before they are split."""

    def __init__(self):
        super().__init__()
        self.heads, self.keys, self.size = H, 2, D // H
        self.qkv, self.out = nn.Linear(D, (H + 2 * self.keys) * self.size, bias=False), nn.Linear(D, D)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).view(b, n, self.heads + 2 * self.keys, self.size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.keys, self.keys), dim=1)
        k, v = (each[:, :, None].expand(b, self.keys, H // self.keys, n, self.size).flatten(1, 2) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c))


class FusedHeadsIndexed(FusedSlices):
    """The same layer; heads are a dimension of their own before they are indexed, as in Falcon."""

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).view(b, n, self.heads + 2, self.size)
        q, k, v = qkv[..., :-2, :], qkv[..., [-2], :], qkv[:, :, -1]
        scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).div(self.size**0.5)
        return self.out((scores.softmax(-1) @ v.unsqueeze(1)).transpose(1, 2).reshape(b, n, c))


FUSED_KEYS = (FusedOneKey, FusedOneKeyKernel, FusedFewKeys, FusedWithGate, FusedSlices, FusedHeads, FusedHeadsIndexed)
KEYS = (OneKey, OneKeyEach, OneKeyEinsum, OneKeyRepeated, OneKeyParameters, *FUSED_KEYS)
"""All of these can be split on 2 ranks and on 4."""
