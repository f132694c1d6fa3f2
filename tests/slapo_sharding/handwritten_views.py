"""Attention that gives a tensor as an example of a shape or a dtype, that views several dimensions at once, or has distances.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
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


VIEWS = (ViewedAs, LengthFirstHeads, Distances, RandomFeatures)
"""All of these can be split on 2 ranks and on 4."""
