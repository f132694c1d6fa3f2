"""Rules for convolutions of torch, transposed ones too, in 1 to 3 dimensions: split along output or input channels.

Channels stand before the spatial dimensions, so values are sharded along dimension -2, -3 or -4. Groups of channels are never
split: each rank convolves its own groups, on an input that is sharded the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .norms import is_by_channel
from .sharding_rule import Cut, ShardingRule, computes_as, forward_with

_PLAIN: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def channel_dim(module: nn.Module) -> int:
    """Return the channel dimension of a convolution or of a module that treats channels separately; -1 for others."""
    if isinstance(module, _PLAIN + _TRANSPOSED):
        return -1 - len(module.kernel_size)  # type: ignore[arg-type]
    return 1 if is_by_channel(module) else -1


def without_bias(module: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a convolution with split input channels: a partial output."""
    return forward_with(module, {"bias": None}, input, *args, **kwargs)  # type: ignore[no-any-return]


def _matcher_of(kind: type[nn.Module], grouped: bool) -> Callable[[nn.Module], bool]:
    def matches(module: Any) -> bool:
        return computes_as(module, kind) and (module.__dict__["groups"] > 1) is grouped

    return matches


def _rules(kind: type[nn.Module], dim: int, output: int) -> Iterator[ShardingRule]:
    """Yield the rules of a convolution class, for one group and for several.

    ``dim`` is the dimension of the channels, ``output`` that of the weight's output channels if there is one group.
    """
    name, counts = kind.__name__, ("in_channels", "out_channels", "groups")
    column = Cut({"weight": output, "bias": 0}, "replicated", "sharded", ("out_channels",), dim=dim)
    row = Cut({"weight": 1 - output}, "sharded", "partial", ("in_channels",), without_bias, late_bias=True, dim=dim)
    yield ShardingRule(name, _matcher_of(kind, False), (column, row))
    groups = Cut({"weight": 0, "bias": 0}, "sharded", "sharded", counts, fusable=False, dim=dim)
    yield ShardingRule(f"grouped {name}", _matcher_of(kind, True), (groups,))


RULES = [
    rule
    for kinds, output in ((_PLAIN, 0), (_TRANSPOSED, 1))
    for spatial, kind in enumerate(kinds, start=1)
    for rule in _rules(kind, -1 - spatial, output)
]
