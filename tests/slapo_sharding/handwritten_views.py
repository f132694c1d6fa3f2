"""Attention that gives a tensor as an example of a shape or a dtype, that views several dimensions at once, or has distances.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D, H, OneEach


class ViewedAs(OneEach):
    """As modded-nanoGPT: values of the input's own beside those of a layer, viewed as these."""

    def __init__(self):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([0.4, 0.6]))

    def forward(self, x):
        b, n = x.size(0), x.size(1)
        q, k, v = (layer(x).view(b, n, self.heads, -1) for layer in (self.q, self.k, self.v))
        q, k = (F.rms_norm(each, (each.size(-1),)) for each in (q, k))
        v = self.lambdas[0] * v + self.lambdas[1] * v.detach().roll(1, 1).view_as(v)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view_as(x))


class LengthFirstHeads(OneEach):
    """As fairseq: ``[length, batch, width]`` is viewed as ``[length, batch * heads, size]``."""

    def forward(self, x):
        x = x.transpose(0, 1)
        n, b, c = x.size()
        d = c // self.heads
        q, k, v = (layer(x).contiguous().view(n, b * self.heads, d).transpose(0, 1) for layer in (self.q, self.k, self.v))
        weights = torch.bmm(q * d**-0.5, k.transpose(1, 2))
        assert list(weights.size()) == [b * self.heads, n, n]
        out = torch.bmm(weights.float().softmax(-1).type_as(weights), v)
        return self.o(out.transpose(0, 1).contiguous().view(n, b, c)).transpose(0, 1)


class Distances(OneEach):
    """As Shaw's relative positions: queries times a table of distances."""

    def __init__(self):
        super().__init__()
        self.distances, self.most = nn.Embedding(2 * 6 + 1, D // H), 6

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (layer(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        steps = torch.arange(n, device=x.device)
        table = self.distances((steps[:, None] - steps[None]).clamp(-self.most, self.most) + self.most).to(q)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,ijd->bhij", q, table)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class RandomFeatures(OneEach):
    """As Performer: a matrix in a buffer, repeated for all heads and taken to the dtype of the queries."""

    def __init__(self):
        super().__init__()
        self.register_buffer("projection", torch.randn(12, D // H))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (layer(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = ((self._projected(each) * 0.1).exp() for each in (q, k))
        norm = 1 / torch.einsum("...nd,...d->...n", q, k.sum(-2).type_as(q))
        context = torch.einsum("...nd,...ne->...de", k, v)
        return self.o(torch.einsum("...de,...nd,...n->...ne", context, q, norm).transpose(1, 2).reshape(b, n, c))

    def _projected(self, x):
        b, h, *_ = x.shape
        return torch.einsum("...id,...jd->...ij", x, self.projection.expand(b, h, -1, -1).type_as(x))


class RepeatedMask(OneEach):
    """As lucidrains' older code: heads in the batch, and a mask that is repeated for them."""

    def forward(self, x):
        h = self.heads
        q, k, v = (rearrange(layer(x), "b n (h d) -> (b h) n d", h=h) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bid,bjd->bij", q, k) * (D // H) ** -0.5
        mask = repeat(x[..., 0] > 0, "b j -> (b h) () j", h=h)
        scores.masked_fill_(mask, -100.0)
        return self.o(rearrange(torch.einsum("bij,bjd->bid", scores.softmax(-1), v), "(b h) n d -> b n (h d)", h=h))


class ImageDistances(nn.Module):
    """As SAM: a fused projection of images, heads in the batch, and distances along rows and columns."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(D, 3 * D), nn.Linear(D, D), H
        self.rows, self.columns = nn.Parameter(torch.randn(3, D // H)), nn.Parameter(torch.randn(23, D // H))

    def forward(self, x):
        b, n, c = x.shape
        x = x.view(b, 2, n // 2, c)
        height, width = x.shape[1:3]
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * self.heads, n, -1).unbind(0)
        weights = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        images = q.reshape(b * self.heads, height, width, -1)
        rows = torch.einsum("bhwc,hkc->bhwk", images, self._table(self.rows, height))
        columns = torch.einsum("bhwc,wkc->bhwk", images, self._table(self.columns, width))
        weights = weights.view(-1, height, width, height, width) + rows[..., :, None] + columns[..., None, :]
        out = weights.view(-1, n, n).softmax(-1) @ v
        out = out.view(b, self.heads, height, width, -1).permute(0, 2, 3, 1, 4).reshape(b, height, width, -1)
        return self.proj(out).view(b, n, c)

    def _table(self, table, size):
        steps = torch.arange(size)
        return table[steps[:, None] - steps[None] + size - 1]


class UnfoldedWindows(OneEach):
    """Attention to the last three positions, by ``unfold``."""

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (layer(x).view(b, n, self.heads, c // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (F.pad(each, (0, 0, 2, 0)).unfold(2, 3, 1) for each in (k, v))
        weights = torch.einsum("bhnd,bhndw->bhnw", q, k).softmax(-1)
        return self.o(torch.einsum("bhnw,bhndw->bhnd", weights, v).transpose(1, 2).reshape(b, n, c))


class Reflected(nn.Module):
    """An MLP of convolutions, with padding that reflects between them."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Conv1d(D, 2 * D, 1), nn.Conv1d(2 * D, D, 3)

    def forward(self, x):
        return self.narrow(F.pad(F.gelu(self.wide(x.transpose(1, 2))), (1, 1), mode="reflect")).transpose(1, 2)


VIEWS = (ViewedAs, RepeatedMask, Reflected, UnfoldedWindows, ImageDistances, LengthFirstHeads, Distances, RandomFeatures)
"""All of these can be split on 2 ranks and on 4."""
