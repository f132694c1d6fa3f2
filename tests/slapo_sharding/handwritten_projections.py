"""Self-attention as people write it by hand: every way to make heads, and to know how many and how wide they are."""

from __future__ import annotations

import math

import torch
from einops import rearrange, repeat
from torch import nn
from torch.nn import functional as F

D, H = 32, 4


class SplitByWidth(nn.Module):
    """As nanoGPT: fused, split by the width, which is that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.n_head, self.n_embd = H, D

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MaskedByHand(SplitByWidth):
    """As nanoGPT without flash attention: a mask in a buffer, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.drop(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class PermuteUnbind(nn.Module):
    """As timm's ViT: reshape to five dimensions, permute, unbind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(D, D * 3), nn.Linear(D, D)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class IndexedQkv(nn.Module):
    """As the older ViT: C // heads computed in the forward, q, k, v by index."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv, self.proj = nn.Linear(D, D * 3, bias=False), nn.Linear(D, D)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * (C // self.num_heads) ** -0.5
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class ChunkThenView(nn.Module):
    """Chunk, and a head's width from the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.out, self.heads = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D), H

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(b, n, c))


class ViewThenUnbind(nn.Module):
    """As FlashAttention's module: view to [b, n, 3, h, d], unbind(2)."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.out_proj, self.h = nn.Linear(D, 3 * D), nn.Linear(D, D), H

    def forward(self, x):
        bs, n, dim = x.size()
        q, k, v = self.Wqkv(x).view(bs, n, 3, self.h, dim // self.h).unbind(2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out_proj(out.transpose(1, 2).reshape(bs, n, dim))


class Sliced(nn.Module):
    """q, k and v as ranges of the fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.d_model, self.nhead = D, H

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.in_proj(x)
        q, k, v = qkv[..., : self.d_model], qkv[..., self.d_model : 2 * self.d_model], qkv[..., 2 * self.d_model :]
        q, k, v = (each.reshape(b, t, self.nhead, d // self.nhead).permute(0, 2, 1, 3) for each in (q, k, v))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).reshape(b, t, d))


class OneEach(nn.Module):
    """One projection for each of q, k and v, and C // heads of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.heads = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), H

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q, k, v = (p(x).view(b, n, self.heads, d).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o((((q @ k.mT) / d**0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class GroupedByRepeat(nn.Module):
    """Grouped keys, repeated to the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k_proj, self.v_proj = nn.Linear(D, D // 2), nn.Linear(D, D // 2)
        self.heads, self.kv = 8, 4

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q = self.q_proj(x).reshape(b, n, self.heads, d).transpose(1, 2)
        k, v = (
            p(x).reshape(b, n, self.kv, d).transpose(1, 2).repeat_interleave(self.heads // self.kv, 1)
            for p in (self.k_proj, self.v_proj)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c))


class GroupedByExpand(GroupedByRepeat):
    """Grouped keys, expanded as in Llama's own code."""

    def forward(self, x):
        b, n, c = x.shape
        d, groups = c // self.heads, self.heads // self.kv
        q = self.q_proj(x).view(b, n, self.heads, d).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.kv, d)
        v = self.v_proj(x).view(b, n, self.kv, d)
        k = k[:, :, :, None, :].expand(b, n, self.kv, groups, d).reshape(b, n, self.heads, d).transpose(1, 2)
        v = v[:, :, :, None, :].expand(b, n, self.kv, groups, d).reshape(b, n, self.heads, d).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, c))


class GroupedByKernel(GroupedByRepeat):
    """Grouped keys by ``enable_gqa``."""

    def forward(self, x):
        b, n, c = x.shape
        d = c // self.heads
        q = self.q_proj(x).view(b, n, self.heads, d).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.kv, d).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.kv, d).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(b, n, c))


class Einops(nn.Module):
    """As lucidrains writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = H, (D // H) ** -0.5
        self.to_qkv, self.to_out = nn.Linear(D, D * 3, bias=False), nn.Sequential(nn.Linear(D, D), nn.Dropout(0.0))

    def forward(self, x):
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class EinopsFused(nn.Module):
    """q, k and v taken apart by one rearrange."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.n_heads = nn.Linear(D, 3 * D), nn.Linear(D, D), H

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.n_heads)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(rearrange(out, "b h n d -> b n (h d)"))


class EinopsGrouped(nn.Module):
    """Grouped keys by einops.repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.h, self.g = 8, 4

    def forward(self, x):
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=self.h)
        k, v = self.kv(x).chunk(2, dim=-1)
        k, v = (repeat(t, "b n (g d) -> b (g r) n d", g=self.g, r=self.h // self.g) for t in (k, v))
        return self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Einsum(nn.Module):
    """Scores by einsum without moving the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.nh = H

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.nh, C // self.nh) for f in (self.q, self.k, self.v))
        w = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(C // self.nh)
        return self.o(torch.einsum("bhts,bshd->bthd", w.softmax(-1), v).reshape(B, T, C))


class Temperature(OneEach):
    """A learned temperature for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.linspace(0.5, 1.5, H).view(H, 1, 1))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o((((q @ k.mT) * self.temperature).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class Alibi(OneEach):
    """A slope for each head, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([2.0 ** -(i + 1) for i in range(H)]))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (p(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        bias = self.slopes.view(1, self.heads, 1, 1) * distance.abs().neg()
        return self.o(((q @ k.mT) / (c // self.heads) ** 0.5 + bias).softmax(-1).matmul(v).transpose(1, 2).reshape(b, n, c))
