"""Recurrences over the length, as people write them: a selective scan, and a time mixing.

Every module takes ``[batch, length, 32]`` and gives the same shape.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.handwritten_projections import D

_STATES, _RANK = 4, 2


class SelectiveScan(nn.Module):
    """The mixer of Mamba, with a loop over the length."""

    def __init__(self):
        super().__init__()
        inner = self.inner = 2 * D
        self.in_proj, self.out_proj = nn.Linear(D, 2 * inner, bias=False), nn.Linear(inner, D, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, _RANK + 2 * _STATES, bias=False), nn.Linear(_RANK, inner)
        self.A_log = nn.Parameter(torch.arange(1, _STATES + 1).float().log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, x):
        b, n, _ = x.shape
        x, gate = self.in_proj(x).split([self.inner, self.inner], dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :n].transpose(1, 2))
        return self.out_proj(self.scan(x, b, n) * F.silu(gate))

    def scan(self, x, b, n):
        delta, into, out = self.x_proj(x).split([_RANK, _STATES, _STATES], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.A_log)))
        added = torch.einsum("bld,bln,bld->bldn", delta, into, x)
        state, found = x.new_zeros(b, self.inner, _STATES), []
        for step in range(n):
            state = decay[:, step] * state + added[:, step]
            found.append(torch.einsum("bdn,bn->bd", state, out[:, step]))
        return torch.stack(found, dim=1) + x * self.D


class TimeMixing(nn.Module):
    """The attention of RWKV, with a loop over the length."""

    def __init__(self):
        super().__init__()
        self.mix = nn.ParameterList(torch.linspace(0, 1, D).view(1, 1, D) for _ in range(3))
        self.key, self.value, self.receptance, self.output = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.decay, self.first = nn.Parameter(torch.linspace(-1, 1, D)), nn.Parameter(torch.linspace(0, 1, D))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        mixed = (x * mix + before * (1 - mix) for mix in self.mix)
        k, v, r = (layer(each) for layer, each in zip((self.key, self.value, self.receptance), mixed, strict=True))
        weights, numbers, total, found = k.clamp(max=8).exp(), 0, 1e-6, []
        for step in range(x.shape[1]):
            own = self.first.exp() * weights[:, step]
            found.append((numbers + own * v[:, step]) / (total + own))
            decay = torch.exp(-self.decay.exp())
            numbers, total = decay * numbers + weights[:, step] * v[:, step], decay * total + weights[:, step]
        return self.output(r.sigmoid() * torch.stack(found, dim=1))


SCANS = (SelectiveScan, TimeMixing)
