"""Attention and MLPs whose weights are parameters of their own, in every kind of product.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


def bias(width: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-0.5, 0.5, width))


def heads(x):
    return x.view(*x.shape[:2], H, -1).transpose(1, 2)


def attend(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).reshape(len(q), -1, D)


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


class FusedMatmul(nn.Module):
    """A fused projection and its bias, both parameters, and biases after all products."""

    def __init__(self):
        super().__init__()
        self.w_qkv, self.b_qkv, self.w_o, self.b_o = weight(D, 3 * D), bias(3 * D), weight(D, D), bias(D)

    def forward(self, x):
        q, k, v = map(heads, (x @ self.w_qkv + self.b_qkv).chunk(3, dim=-1))
        return attend(q, k, v) @ self.w_o + self.b_o


class FusedLinear(nn.Module):
    """As torch's own attention: a packed projection in ``F.linear``, with biases there."""

    def __init__(self):
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = weight(3 * D, D), bias(3 * D)
        self.out_weight, self.out_bias, self.num_heads = weight(D, D), bias(D), H

    def forward(self, x):
        B, N, C = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return F.linear(attend(q, k, v), self.out_weight, self.out_bias)


class Addmm(nn.Module):
    """As GPT-2's Conv1D inside one module."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = weight(D, 4 * D), bias(4 * D), weight(4 * D, D), bias(D)

    def forward(self, x):
        hidden = F.gelu(torch.addmm(self.b1, x.reshape(-1, D), self.w1))
        return torch.addmm(self.b2, hidden, self.w2).view(x.shape)


class GatedMatmul(nn.Module):
    """A gate, the norm before and the residual sum after, in one module."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
        self.w_gate, self.w_up, self.w_down, self.slope = weight(D, 2 * D), weight(D, 2 * D), weight(2 * D, D), bias(1)

    def forward(self, x):
        h = F.layer_norm(x, (D,), self.scale, self.shift)
        return x + (F.silu(h @ self.w_gate) * (h @ self.w_up) * self.slope) @ self.w_down


class StackedGate(nn.Module):
    """Gate and value in one parameter of three dimensions."""

    def __init__(self):
        super().__init__()
        self.both, self.out = weight(2, D, 2 * D), weight(2 * D, D)

    def forward(self, x):
        gate, value = torch.einsum("bnd,tdf->tbnf", x, self.both)
        return torch.einsum("...f,fd->...d", gate.sigmoid() * value, self.out)


class Lists(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self):
        super().__init__()
        self.into = nn.ParameterList(weight(D, D) for _ in range(3))
        self.out = nn.ParameterDict({"weight": weight(D, D), "bias": bias(D)})

    def forward(self, x):
        q, k, v = (heads(x @ w) for w in self.into)
        return attend(q, k, v) @ self.out["weight"].T + self.out["bias"]


class LayerThenParameter(nn.Module):
    """A layer along the output and a parameter along the input, and the other way round."""

    def __init__(self):
        super().__init__()
        self.up, self.w_down, self.w_up, self.down = (
            nn.Linear(D, 2 * D),
            weight(2 * D, D),
            weight(2 * D, D),
            nn.Linear(2 * D, D),
        )

    def forward(self, x):
        return torch.relu(self.up(x)) @ self.w_down + self.down(torch.tanh(F.linear(x, self.w_up)))


class WeightsFirst(nn.Module):
    """The weight on the left, on channels before positions."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1, self.w2 = weight(4 * D, D), nn.Parameter(torch.randn(4 * D, 1) * 0.1), weight(D, 4 * D)

    def forward(self, x):
        return torch.matmul(self.w2, torch.relu(torch.matmul(self.w1, x.transpose(1, 2)) + self.b1)).transpose(1, 2)


class PerHead(nn.Module):
    """A matrix for each head, in products that repeat the input."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = *(weight(H, D, D // H) for _ in range(3)), weight(H, D // H, D)

    def forward(self, x):
        q, k, v = (x.unsqueeze(1) @ w for w in (self.wq, self.wk, self.wv))
        return (F.scaled_dot_product_attention(q, k, v) @ self.wo).sum(1)


class Tensordot(nn.Module):
    """``torch.tensordot``, and a scale for each head."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = *(weight(D, H, D // H) for _ in range(3)), weight(H, D // H, D)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H).view(H, 1, 1))

    def forward(self, x):
        q, k, v = (torch.tensordot(x, w, dims=1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q * self.scale, k, v)
        return torch.tensordot(out.transpose(1, 2), self.wo, dims=2)


class LowRank(nn.Module):
    """A low-rank update of a weight, as adapters have it."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.a, self.b = weight(4 * D, D), weight(D, 4 * D), weight(4, D), weight(4 * D, 4)

    def forward(self, x):
        hidden = F.linear(x, self.w1) + F.linear(F.linear(x, self.a), self.b) * 0.5
        return F.linear(torch.relu(hidden), self.w2)


class NormBetween(nn.Module):
    """An RMS norm of one's own over all of the hidden width."""

    def __init__(self):
        super().__init__()
        self.w1, self.scale, self.w2 = weight(D, 2 * D), nn.Parameter(torch.linspace(0.5, 1.5, 2 * D)), weight(2 * D, D)

    def forward(self, x):
        h = x @ self.w1
        return F.silu(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale) @ self.w2


class TiedProducts(nn.Module):
    """One parameter for both products, as autoencoders have it."""

    def __init__(self):
        super().__init__()
        self.w, self.b = weight(D, 2 * D), bias(D)

    def forward(self, x):
        return torch.relu(x @ self.w) @ self.w.T + self.b


class Product(nn.Module):
    def forward(self, x, w):
        return x @ w


class GivenToModules(nn.Module):
    """Parameters that another module is given."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.product = weight(D, 2 * D), weight(2 * D, D), Product()

    def forward(self, x):
        return self.product(torch.relu(self.product(x, self.w1)), self.w2)


class LongConvolution(nn.Module):
    """A convolution over the whole length by Fourier transforms, with a filter for each channel, as in Hyena."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.filter = nn.Parameter(torch.randn(D, 32, generator=torch.Generator().manual_seed(1)) * 0.3)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = self.inner(x).split(x.shape[-1], -1)
        spectrum = torch.fft.rfft((k * v).mT, n=2 * n) * torch.fft.rfft(self.filter[:, :n], n=2 * n)
        return self.out(q * torch.fft.irfft(spectrum, n=2 * n)[..., :n].mT)


class FourierFilter(nn.Module):
    """A complex number for each frequency and channel, as in GFNet."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(17, 2 * D, dtype=torch.cfloat, generator=generator) * 0.3)

    def forward(self, x):
        found = torch.fft.rfft(self.inner(x), dim=1, norm="ortho")
        return self.out(torch.fft.irfft(found * self.weight[: found.shape[1]], n=x.shape[1], dim=1, norm="ortho"))


class ScaleAndShift(nn.Module):
    """A parameter that is used on sharded values, and one beside it that is used on whole ones."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.linspace(0.5, 2.0, 8)), nn.Parameter(torch.zeros(D))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        pieces = self.up(x + self.shift).unflatten(-1, (-1, 8)) * self.scale
        return self.down(torch.tanh(pieces.flatten(-2))) + self.shift


class SpatialGate(nn.Module):
    """A gate by chunk behind an activation, and a product over the length with a matrix of its own, as in gMLP."""

    def __init__(self):
        super().__init__()
        self.inner, self.out, self.norm = nn.Linear(D, 8 * D), nn.Linear(4 * D, D), nn.LayerNorm(4 * D)
        generator = torch.Generator().manual_seed(1)
        self.mix, self.bias = nn.Parameter(torch.randn(32, 32, generator=generator) * 0.2), nn.Parameter(torch.ones(32))

    def forward(self, x):
        n = x.shape[1]
        u, v = torch.nn.functional.gelu(self.inner(x)).chunk(2, dim=-1)
        v = torch.einsum("bnd,mn->bmd", self.norm(v), self.mix[:n, :n].tril()) + self.bias[:n, None]
        return self.out(u * v)


class ExpandedMask(nn.Module):
    """Windows of timm's Swin: a mask expanded to all heads is added to a table of them, and the size of a head follows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.make_projections()
        self.table = nn.Parameter(torch.randn(3, H))
        self.register_buffer("index", torch.arange(16).view(4, 4) % 3)
        self.register_buffer("mask", -9 * torch.eye(4).flip(0)[None])

    def make_projections(self) -> None:
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def projected(self, x):
        B, N, _ = x.shape
        return self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        whole, mask = x.shape, self.mask
        x = x.reshape(-1, 4, x.shape[-1])
        B, N, _ = x.shape
        q, k, v = self.projected(x)
        bias = self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        mask = mask.view(1, 1, 1, N, N).expand(B, -1, self.num_heads, -1, -1)
        bias = bias + mask.reshape(-1, self.num_heads, N, N)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(whole))


class ExpandedMaskApart(ExpandedMask):
    """The same with a projection each, by names from which a shard step knows that they make heads."""

    def make_projections(self) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(D, D) for _ in range(4))

    def projected(self, x):
        B, N, _ = x.shape
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [each(x).reshape(B, N, self.num_heads, -1).transpose(1, 2) for each in layers]


@dataclass
class Notes:
    """A record of an attention's call beside its output."""

    scores: torch.Tensor
    kind: str = ""


class Telling(nn.Module):
    """An attention that returns notes, in which the module around it writes, as x-transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (each.view(B, T, H, C // H).transpose(1, 2) for each in self.qkv(x).split(C, dim=2))
        scores = (q @ k.mT) * (C // H) ** -0.5
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)), Notes(scores.detach())


class Told(nn.Module):
    """The module around the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Telling()

    def forward(self, x):
        out, notes = self.attention(x)
        notes.kind = "self"
        return out


class WeightRead(nn.Module):
    """A projection whose weight is read and whose bias is computed, and a network for the position biases, as in SwinV2."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(D) * 0.1), nn.Parameter(torch.randn(D) * 0.1)
        self.scale = nn.Parameter(torch.full((H, 1, 1), 10.0).log())
        self.position = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, H, bias=False))

    def forward(self, x):
        b, n, c = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        q, k, v = F.linear(x, self.qkv.weight, bias).reshape(b, n, 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale.clamp(max=4.6).exp()
        offsets = (torch.arange(n)[:, None] - torch.arange(n)).unsqueeze(-1) / n
        scores = scores + self.position(offsets).sigmoid().mul(16).permute(2, 0, 1).unsqueeze(0)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class MemoryKeys(nn.Module):
    """Keys and values in a parameter beside those of the input, as in x-transformers."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.memory = nn.Parameter(torch.randn(2, H, 3, D // H))

    def forward(self, x):
        b, n, c = x.shape
        q = self.q(x).view(b, n, H, -1).transpose(1, 2)
        own = self.kv(x).view(b, n, 2, H, -1).permute(2, 0, 3, 1, 4)
        k, v = (torch.cat((each.expand(b, -1, -1, -1), new), 2) for each, new in zip(self.memory, own, strict=True))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


PARAMETERS = (
    Told,
    ExpandedMask,
    ExpandedMaskApart,
    *(MatmulMlp, EinsumAttention, BatchedExperts, FusedMatmul, FusedLinear, Addmm, GatedMatmul, StackedGate, Lists),
    *(LayerThenParameter, WeightsFirst, PerHead, Tensordot, LowRank, NormBetween, TiedProducts, GivenToModules),
    *(LongConvolution, FourierFilter, ScaleAndShift, SpatialGate, WeightRead, MemoryKeys),
)
"""All of these can be split on 2 ranks and on 4."""
