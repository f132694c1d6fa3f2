"""Plugin with right and wrong sharding rules, for tests of the conformance kit."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import hookimpl
from slapo_sharding import Cut, ShardingRule
from slapo_testing.conformance import RuleExample


class Gated(nn.Module):
    """Gate and value in one weight, each split for itself."""

    def __init__(self, out: int = 12) -> None:
        super().__init__()
        self.out = out
        self.both, self.shift = nn.Parameter(torch.randn(2 * out, 8) / 8), nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = (x @ self.both.T).split(self.out, dim=-1)
        return gate.sigmoid() * value + self.shift


class Row(nn.Module):
    """Row-parallel layer with a bias that may be missing."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.table, self.bias = nn.Parameter(torch.randn(width, 6) / 8), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.table
        return y if self.bias is None else y + self.bias


class Positions(nn.Module):
    """Scale of each channel, with a table of all channels that stays whole."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("offsets", torch.arange(float(width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offsets


class Gained(nn.Module):
    """Scale of each channel, and one of all channels that stays whole: each rank has a part of its gradient."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.randn(width)), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.gain


class RightGated(Gated): ...


class WholeShift(Gated): ...


class MixedBlocks(Gated): ...


class HiddenSum(Gated): ...


class RightRow(Row): ...


class BiasOnEachRank(Row): ...


class DetachedRow(Row): ...


class EvenPositions(Positions): ...


class RightPositions(Positions): ...


class RightGain(Gained): ...


class PartialGain(Gained): ...


class ReadsValues(Positions): ...


class Unsplit(Row): ...


def without_bias(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ module.table


def with_bias(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ module.table + module.bias


def detached(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ (module.table * 2 - module.table.detach())


def from_even_ranges(module: Any, x: torch.Tensor) -> torch.Tensor:
    start = dist.get_rank() * len(module.scale)
    return x * module.scale + module.offsets[start:][: len(module.scale)]


def from_ranges(module: Any, x: torch.Tensor) -> torch.Tensor:
    start = dist.get_rank() * -(-len(module.offsets) // dist.get_world_size())
    return x * module.scale + module.offsets[start:][: len(module.scale)]


GATED = Cut({"both": 0, "shift": 0}, "replicated", "sharded", ("out",), parts={"both": 2})
ROW = Cut({"table": 0}, "sharded", "partial", forward=without_bias, late_bias=True, uneven=True)
POSITIONS = Cut({"scale": 0}, "sharded", "sharded", uneven=True)
CUTS = {
    RightGated: GATED,
    WholeShift: dataclasses.replace(GATED, dims={"both": 0}),
    MixedBlocks: dataclasses.replace(GATED, parts={}),
    HiddenSum: dataclasses.replace(GATED, input="indices"),
    RightRow: ROW,
    BiasOnEachRank: dataclasses.replace(ROW, forward=with_bias, late_bias=False),
    DetachedRow: dataclasses.replace(ROW, forward=detached),
    EvenPositions: dataclasses.replace(POSITIONS, forward=from_even_ranges),
    RightGain: dataclasses.replace(POSITIONS, summed=("gain",)),
    PartialGain: POSITIONS,
    ReadsValues: dataclasses.replace(POSITIONS, forward=from_ranges),
    RightPositions: dataclasses.replace(POSITIONS, forward=from_ranges),
}


def refuses_zeros(module: Any, cut: Cut) -> str | None:
    return "its scale is zero" if isinstance(module, ReadsValues) and not module.scale.any() else None


def _rule(kind: type[nn.Module], cut: Cut) -> ShardingRule:
    return ShardingRule(kind.__name__, lambda module: type(module) is kind, (cut,), refuses_zeros)


@hookimpl
def slapo_shard_rules() -> list[ShardingRule]:
    return [_rule(kind, cut) for kind, cut in CUTS.items()]


def example(kind: type[nn.Module], **options: Any) -> RuleExample:
    """Return an example of one of the layers, with an input of its width."""
    width = 8 if issubclass(kind, Gated) else 7 if issubclass(kind, Row) else 10
    return RuleExample(kind, (torch.randn(3, width),), plugins=(__name__,), **options)


def odd_gated() -> nn.Module:
    """Return a layer with an odd width."""
    return RightGated(13)
