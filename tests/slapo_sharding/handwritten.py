"""Attention, MLPs and blocks as people write them by hand, none with a word of this project.

Every module takes ``[batch, length, 32]`` and gives the same shape, has 4 or 8 heads, and knows its sizes by another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_branches import BRANCHES
from tests.slapo_sharding.handwritten_keys import KEYS
from tests.slapo_sharding.handwritten_norms import NORMS
from tests.slapo_sharding.handwritten_others import MODES
from tests.slapo_sharding.handwritten_parameters import PARAMETERS
from tests.slapo_sharding.handwritten_projections import (
    Alibi,
    ChunkThenView,
    D,
    Einops,
    EinopsFused,
    EinopsGrouped,
    Einsum,
    GroupedByExpand,
    GroupedByKernel,
    GroupedByRepeat,
    H,
    IndexedQkv,
    MaskedByHand,
    OneEach,
    PermuteUnbind,
    Sliced,
    SplitByWidth,
    Temperature,
    ViewThenUnbind,
)
from tests.slapo_sharding.handwritten_reused import REUSED, MakeHeads
from tests.slapo_sharding.handwritten_scans import SCANS


class RelativeTable(OneEach):
    """A table of relative positions with a column for each head, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * 32 - 1, H, generator=torch.Generator().manual_seed(1)) * 0.3)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        index = torch.arange(n)[:, None] - torch.arange(n)[None, :] + 31
        bias = self.table[index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5 + bias.unsqueeze(0)
        return self.o((attn.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class Sinks(OneEach):
    """A learned sink for each head, as in GPT-OSS."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1.0, 1.0, H))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = (q @ k.mT) / (c // self.heads) ** 0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, n, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, c))


class HeadNorms(nn.Module):
    """Norms of q and k over the width of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D), H
        self.q_norm, self.k_norm = nn.LayerNorm(D // H), nn.LayerNorm(D // H)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class Rms(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class OwnHeadNorms(OneEach):
    """The same with an RMS norm of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.qn, self.kn = Rms(D // H), Rms(D // H)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads) for p in (self.q, self.k, self.v))
        q, k = self.qn(q), self.kn(k)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(out.transpose(1, 2).reshape(b, n, c))


class RotaryComplex(OneEach):
    """Rotary positions by complex numbers, as Llama's own code has it."""

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q, k, v = (p(x).view(b, n, self.heads, d) for p in (self.q, self.k, self.v))
        angles = torch.outer(torch.arange(n).float(), 1.0 / 100 ** (torch.arange(0, d, 2).float() / d))
        turn = torch.polar(torch.ones_like(angles), angles).view(1, n, 1, d // 2)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * turn).flatten(3) for t in (q, k)
        )
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o(out.transpose(1, 2).contiguous().view(b, n, c))


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class RotaryHalves(OneEach):
    """Rotary positions by halves."""

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q, k, v = (p(x).view(b, n, self.heads, d).transpose(1, 2) for p in (self.q, self.k, self.v))
        freqs = torch.outer(torch.arange(n).float(), 1.0 / 100 ** (torch.arange(0, d, 2).float() / d))
        cos, sin = torch.cat((freqs, freqs), -1).cos(), torch.cat((freqs, freqs), -1).sin()
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c))


class InnerCross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o, self.h = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D), H

    def forward(self, x, context):
        b, n, c = x.shape
        m = context.size(1)
        q = self.q(x).view(b, n, self.h, c // self.h).transpose(1, 2)
        k, v = self.kv(context).view(b, m, 2, self.h, c // self.h).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Cross(nn.Module):
    """Keys and values of another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), InnerCross()

    def forward(self, x):
        return x + self.attn(x, context=self.norm(x)[:, : x.shape[1] // 2])


class WindowAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = H, nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * (C // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))


class Windows(nn.Module):
    """Attention in windows, which are rows of the batch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.attn = 4, WindowAttention()

    def forward(self, x):
        B, L, C = x.shape
        windows = x.view(B, L // self.window, self.window, C).reshape(-1, self.window, C)
        return self.attn(windows).view(B, L // self.window, self.window, C).reshape(B, L, C)


class Axial(nn.Module):
    """Attention along columns: the length is folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out, self.heads = nn.Linear(D, 3 * D), nn.Linear(D, D), H

    def forward(self, x):
        b, n, c = x.shape
        grid = x.reshape(b, 2, n // 2, c).transpose(1, 2).reshape(-1, 2, c)
        q, k, v = self.to_qkv(grid).chunk(3, -1)
        q, k, v = (t.reshape(len(grid), 2, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 2, c)
        return self.to_out(out).reshape(b, n // 2, 2, c).transpose(1, 2).reshape(b, n, c)


class BuiltMask(OneEach):
    """A mask that the forward builds."""

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = torch.full((n, n), float("-inf"), device=x.device).triu(1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1)) + mask[None, None]
        return self.o(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v).transpose(1, 2).contiguous().view(b, n, -1))


class FoldedHeads(OneEach):
    """Heads folded into the batch, and ``torch.bmm``."""

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q, k, v = (
            p(x).view(b, n, self.heads, d).transpose(1, 2).reshape(b * self.heads, n, d) for p in (self.q, self.k, self.v)
        )
        weights = torch.bmm(q, k.transpose(1, 2)).div(d**0.5).softmax(-1)
        return self.o(torch.bmm(weights, v).view(b, self.heads, n, d).transpose(1, 2).reshape(b, n, c))


class FoldedWeights(FoldedHeads):
    """The same with a score that is unfolded between, as fairseq and BART have it."""

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q, k, v = (
            p(x).view(b, n, self.heads, d).transpose(1, 2).reshape(b * self.heads, -1, d) for p in (self.q, self.k, self.v)
        )
        weights = torch.bmm(q * d**-0.5, k.transpose(1, 2)).view(b, self.heads, n, n).softmax(-1)
        out = torch.bmm(weights.view(b * self.heads, n, n), v)
        return self.o(out.view(b, self.heads, n, d).transpose(1, 2).reshape(b, n, c))


class LinearAttention(OneEach):
    """Linear attention: keys times values first."""

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = torch.einsum("bhnd,bhne->bhde", k, v)
        norm = 1 / torch.einsum("bhnd,bhd->bhn", q, k.sum(2))
        return self.o(torch.einsum("bhnd,bhde,bhn->bhne", q, context, norm).transpose(1, 2).reshape(b, n, c))


class ChannelAttention(OneEach):
    """Attention between the channels of a head, as Restormer and XCiT have it."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).permute(0, 2, 3, 1) for p in (self.q, self.k, self.v))
        attn = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature).softmax(-1)
        return self.o((attn @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class GatedMlp(nn.Module):
    """A gate by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 8 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * value)


class GatedBySplit(nn.Module):
    """A gate by split, of a width that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 4 * D
        self.w12, self.w3 = nn.Linear(D, 2 * self.hidden), nn.Linear(self.hidden, D)

    def forward(self, x):
        x1, x2 = self.w12(x).split([self.hidden, self.hidden], dim=-1)
        return self.w3(F.silu(x1) * x2)


class GatedByUnflatten(nn.Module):
    """A gate by reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Linear(D, 8 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        pair = self.w_in(x).view(b, n, 2, -1)
        return self.w_out(F.silu(pair[:, :, 0]) * pair[:, :, 1])


class ParallelBlock(nn.Module):
    """Attention and MLP of one projection, as PaLM and ViT-22B have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(D), H
        self.fused, self.attn_out, self.ff_out = nn.Linear(D, 3 * D + 4 * D), nn.Linear(D, D), nn.Linear(4 * D, D)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v, ff = self.fused(self.norm(x)).split((c, c, c, 4 * c), dim=-1)
        q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c)
        return x + self.attn_out(attn) + self.ff_out(F.gelu(ff))


class InnerAttention(nn.Module):
    def forward(self, q, k, v):
        b, h, n, d = q.shape
        weights = (q.reshape(b * h, n, d) @ k.reshape(b * h, n, d).mT / d**0.5).softmax(-1)
        return (weights @ v.reshape(b * h, n, d)).view(b, h, n, d).transpose(1, 2).reshape(b, n, h * d)


class Nested(nn.Module):
    """The heads are made in one module and used in another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner, self.proj, self.heads = nn.Linear(D, 3 * D), InnerAttention(), nn.Linear(D, D), H

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(self.inner(q, k, v))


class Talking(OneEach):
    """A module for making heads, which is called with sharded values."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = MakeHeads(H)

    def forward(self, x):
        q, k, v = (self.cut(p(x)) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LengthFirst(nn.Module):
    """Length first inside, as fairseq and Megatron have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.np = nn.Linear(D, 3 * D), nn.Linear(D, D), H

    def forward(self, x):
        x = x.transpose(0, 1)
        s, b, c = x.shape
        mixed = self.qkv(x).view(s, b, self.np, 3 * c // self.np)
        q, k, v = (t.permute(1, 2, 0, 3) for t in mixed.chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(s, b, c)
        return self.out(out).transpose(0, 1)


class Gated(OneEach):
    """A gate on the output of attention, by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, D)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        return self.o(out * torch.sigmoid(self.gate(x)))


class HeadScale(OneEach):
    """A scale for each head on the output, as NormFormer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, H))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v) * self.gamma[None, :, None, None]
        return self.o(out.transpose(1, 2).reshape(b, n, c))


class BiasOfPairs(OneEach):
    """A bias for each head, computed from pairs by a small layer, as AlphaFold has it."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Linear(1, H, bias=False)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        pairs = (torch.arange(n)[:, None] - torch.arange(n)[None]).float()[..., None] / n
        bias = self.pair(pairs).permute(2, 0, 1)
        return self.o(((q @ k.mT) * (c // self.heads) ** -0.5 + bias).softmax(-1).matmul(v).transpose(1, 2).reshape(b, n, c))


class SqueezedHeads(nn.Module):
    """Heads narrower than the width over their number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.dim_head = H, 4
        inner = self.heads * self.dim_head
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, inner), nn.Linear(D, 2 * inner), nn.Linear(inner, D)

    def forward(self, x):
        b, n, h = *x.shape[:2], self.heads
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, n, h, -1).transpose(1, 2) for t in (q, k, v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, h * self.dim_head))


class FactoredMlp(nn.Module):
    """An MLP whose hidden width is given to ``view`` in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.groups = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), 8

    def forward(self, x):
        b, n, c = x.shape
        hidden = self.fc1(x).view(b, n, self.groups, 4 * c // self.groups)
        return self.fc2((hidden * hidden.sigmoid()).view(b, n, 4 * c))


SPLIT: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(SplitByWidth, MaskedByHand, PermuteUnbind, IndexedQkv, ChunkThenView, ViewThenUnbind, Sliced, OneEach),
        *(GroupedByRepeat, GroupedByExpand, GroupedByKernel, Einops, EinopsFused, EinopsGrouped, Einsum, Temperature, Alibi),
        *(RelativeTable, Sinks, HeadNorms, OwnHeadNorms, RotaryComplex, RotaryHalves, Cross, Windows, Axial, BuiltMask),
        *(FoldedHeads, FoldedWeights, LinearAttention, ChannelAttention, GatedMlp, GatedBySplit, GatedByUnflatten),
        *(ParallelBlock, Nested, Talking, LengthFirst, Gated, HeadScale, BiasOfPairs, SqueezedHeads, FactoredMlp),
        *(*PARAMETERS, *NORMS, *KEYS, *BRANCHES, *SCANS, *REUSED, *MODES),
    )
}
"""All of these can be split on 2 ranks and on 4."""


class Block(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(D), kind()

    def forward(self, x):
        return x + self.part(self.norm(x))


class Net(nn.Module):
    """Two blocks with such a part between an embedding and a head."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, D)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(D, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
