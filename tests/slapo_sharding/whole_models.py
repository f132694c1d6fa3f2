"""Whole language models as people write them by hand, each with inputs whose batch and length change."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

D, H, V = 32, 4, 64


def tokens(batch: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class OwnLayerNorm(nn.Module):
    """A norm whose bias may be left out."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.n_head, self.n_embd = H, D
        self.register_buffer("mask", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class GptMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(D, 4 * D, bias=False), nn.GELU(), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class GptBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            OwnLayerNorm(D, False),
            CausalSelfAttention(),
            OwnLayerNorm(D, False),
            GptMlp(),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """A GPT that computes its loss, with a head tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, D),
                "wpe": nn.Embedding(64, D),
                "h": nn.ModuleList(GptBlock() for _ in range(2)),
                "ln_f": OwnLayerNorm(D, False),
            }
        )
        self.lm_head = nn.Linear(D, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        _, t = idx.size()
        assert t <= 64, f"cannot forward a sequence of length {t}"
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @staticmethod
    def inputs(batch, length, seed):
        return {"idx": tokens(batch, length, seed), "targets": tokens(batch, length, seed + 1)}


class WhisperAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = H
        self.query, self.key = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.value, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, xa=None, mask=None):
        q, k, v = self.query(x), self.key(x if xa is None else xa), self.value(x if xa is None else xa)
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask[:n_ctx, :n_ctx]
        return self.out((F.softmax(qk.float(), dim=-1).to(q.dtype) @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class WhisperBlock(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.attn, self.attn_ln = WhisperAttention(), nn.LayerNorm(D)
        self.cross_attn = WhisperAttention() if cross else None
        self.cross_attn_ln = nn.LayerNorm(D) if cross else None
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.mlp_ln = nn.LayerNorm(D)

    def forward(self, x, xa=None, mask=None):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)
        return x + self.mlp(self.mlp_ln(x))


def sinusoids(length: int, channels: int) -> torch.Tensor:
    steps = torch.exp(-math.log(10000) / (channels // 2 - 1) * torch.arange(channels // 2))
    times = torch.arange(length)[:, None] * steps[None]
    return torch.cat([times.sin(), times.cos()], dim=1)


class AudioEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(8, D, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(D, D, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(64, D))
        self.blocks, self.ln_post = nn.ModuleList(WhisperBlock(False) for _ in range(2)), nn.LayerNorm(D)

    def forward(self, x):
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).permute(0, 2, 1)
        x = (x + self.positional_embedding[: x.shape[1]]).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding, self.positional_embedding = nn.Embedding(V, D), nn.Parameter(torch.randn(64, D) * 0.1)
        self.blocks, self.ln = nn.ModuleList(WhisperBlock(True) for _ in range(2)), nn.LayerNorm(D)
        self.register_buffer("mask", torch.empty(64, 64).fill_(-torch.inf).triu_(1), persistent=False)

    def forward(self, x, xa):
        x = self.token_embedding(x) + self.positional_embedding[: x.shape[-1]]
        for block in self.blocks:
            x = block(x, xa, mask=self.mask)
        x = self.ln(x)
        return (x @ torch.transpose(self.token_embedding.weight.to(x.dtype), 0, 1)).float()


class Whisper(nn.Module):
    """Convolutions and an encoder of sounds, and a decoder with cross attention whose embedding is its head, too."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = AudioEncoder(), TextDecoder()

    def forward(self, mel, tokens):
        return self.decoder(tokens, self.encoder(mel))

    @staticmethod
    def inputs(batch, length, seed):
        return {"mel": noise(batch, 8, 2 * length, seed=seed), "tokens": tokens(batch, length - 2, seed)}


class MambaMixer(nn.Module):
    """A selective scan, written as a loop."""

    def __init__(self, inner=2 * D, states=4, rank=4):
        super().__init__()
        self.inner, self.states, self.rank = inner, states, rank
        self.in_proj = nn.Linear(D, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).repeat(inner, 1).log())
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x):
        b, length, _ = x.shape
        x, res = self.in_proj(x).split([self.inner, self.inner], dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        return self.out_proj(self.scan(x) * F.silu(res))

    def scan(self, u):
        delta, B, C = self.x_proj(u).split([self.rank, self.states, self.states], dim=-1)
        delta, A = F.softplus(self.dt_proj(delta)), -self.A_log.float().exp()
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        added = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for step in range(u.shape[1]):
            state = decay[:, step] * state + added[:, step]
            outputs.append(torch.einsum("bdn,bn->bd", state, C[:, step]))
        return torch.stack(outputs, dim=1) + u * self.D


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.g = width**0.5, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class Residual(nn.Module):
    def __init__(self, norm, inner):
        super().__init__()
        self.norm, self.mixer = norm, inner

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Mamba(nn.Module):
    """A stack of selective scans."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Residual(RmsNorm(D), MambaMixer()) for _ in range(2))
        self.norm_f, self.lm_head = RmsNorm(D), nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))

    @staticmethod
    def inputs(batch, length, seed):
        return {"input_ids": tokens(batch, length, seed)}


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width)))

    def forward(self, length):
        freqs = torch.einsum("i,j->ij", torch.arange(length, device=self.inv_freq.device).type_as(self.inv_freq), self.inv_freq)
        return torch.cat((freqs, freqs), dim=-1)


def turned(t, freqs):
    first, second = t.chunk(2, dim=-1)
    return t * freqs.cos() + torch.cat((-second, first), dim=-1) * freqs.sin()


class MemoryAttention(nn.Module):
    """Queries and keys of length one with a scale for each head, and learned keys and values before the others."""

    def __init__(self, dim_head=8):
        super().__init__()
        self.heads, inner = H, H * dim_head
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, inner, bias=False) for _ in range(3))
        self.qk_scale = nn.Parameter(torch.full((H, 1, 1), 2.0))
        self.mem_k, self.mem_v = (nn.Parameter(torch.randn(H, 2, dim_head) * 0.3) for _ in range(2))
        self.to_out = nn.Linear(inner, D, bias=False)

    def forward(self, x, rotary):
        b, n, h = *x.shape[:2], self.heads
        q, k, v = (each.view(b, n, h, -1).transpose(1, 2) for each in (self.to_q(x), self.to_k(x), self.to_v(x)))
        q, k = turned(F.normalize(q, dim=-1), rotary), turned(F.normalize(k, dim=-1), rotary)
        mem_k, mem_v = (each.unsqueeze(0).expand(b, -1, -1, -1) for each in (self.mem_k, self.mem_v))
        k, v = torch.cat((F.normalize(mem_k, dim=-1), k), dim=-2), torch.cat((mem_v, v), dim=-2)
        dots = torch.einsum("b h i d, b h j d -> b h i j", q * self.qk_scale, k)
        i, j = dots.shape[-2:]
        dots = dots.masked_fill(torch.ones((i, j), dtype=torch.bool).triu(j - i + 1), -torch.finfo(dots.dtype).max)
        out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1, dtype=torch.float32), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class Glu(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.proj, self.act = nn.Linear(D, inner * 2), nn.SiLU()

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(Glu(4 * D), nn.Dropout(0.0), nn.Linear(4 * D, D))

    def forward(self, x):
        return self.ff(x)


class XTransformer(nn.Module):
    """Layers in a list of lists, rotary positions, and gated MLPs."""

    def __init__(self):
        super().__init__()
        self.token_emb, self.rotary = nn.Embedding(V, D), Rotary(8)
        kinds = (MemoryAttention, FeedForward) * 2
        self.layers = nn.ModuleList(nn.ModuleList((nn.ModuleList((RmsNorm(D),)), kind())) for kind in kinds)
        self.final_norm, self.to_logits = RmsNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x):
        x = self.token_emb(x)
        rotary = self.rotary(x.shape[1])
        for (norm,), block in self.layers:
            options = {"rotary": rotary} if isinstance(block, MemoryAttention) else {}
            x = x + block(norm(x), **options)
        return self.to_logits(self.final_norm(x))

    @staticmethod
    def inputs(batch, length, seed):
        return {"x": tokens(batch, length, seed)}
