"""Rules for modules of torch with channels: convolutions, and norms and activations that treat channels separately.

Convolutions, transposed ones too, in 1 to 3 dimensions are split along output or input channels. Channels stand before the
spatial dimensions, so values are sharded along dimension -2, -3 or -4. Groups of channels are never split: each rank convolves
its own groups, on an input that is sharded the same way. Norms by channel take an input that is sharded likewise. ``LayerNorm``
and similar norms need the whole last dimension and stay replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .sharding_rule import Cut, ShardingRule, computes_as, forward_with

_PLAIN: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
"""Classes to the number of dimensions of a batch."""
_STATE = ("weight", "bias", "running_mean", "running_var")


def _rule(kind: str, matches: Callable[[Any], bool], names: Iterable[str], *counts: str) -> ShardingRule:
    return ShardingRule(kind, matches, (Cut(dict.fromkeys(names, 0), "sharded", "sharded", counts, fusable=False, dim=1),))


# no ``SyncBatchNorm``, which would mix the ranks' channels, and no PReLU with one slope for all channels
_BY_CHANNEL = (
    _rule("BatchNorm", lambda module: computes_as(module, *_BATCH), _STATE, "num_features"),
    _rule("GroupNorm", lambda module: computes_as(module, nn.GroupNorm), ("weight", "bias"), "num_channels", "num_groups"),
    _rule("InstanceNorm", lambda module: computes_as(module, *_INSTANCE), _STATE, "num_features"),
    _rule("PReLU", lambda each: computes_as(each, nn.PReLU) and each.num_parameters > 1, ("weight",), "num_parameters"),
)


def channel_dim(module: nn.Module) -> int:
    """Return the channel dimension of a convolution or of a module that treats channels separately; -1 for others."""
    if isinstance(module, _PLAIN + _TRANSPOSED):
        return -1 - len(module.kernel_size)  # type: ignore[arg-type]
    return 1 if any(rule.matches(module) for rule in _BY_CHANNEL) else -1


def counts_channels_only(module: nn.Module) -> bool:
    """Return whether a module norms single channels and has no tensors, only their number ``num_features``."""
    held = (*module._parameters.values(), *module._buffers.values())
    return all(each is None for each in held) and computes_as(module, *_INSTANCE, *_BATCH)


def has_batch(module: nn.Module, dims: int) -> bool:
    """Return whether a norm treats a value of ``dims`` dimensions as a batch; InstanceNorm takes unbatched values too."""
    batched = next((size for kind, size in _INSTANCE.items() if isinstance(module, kind)), dims)
    return dims == batched


def without_bias(module: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a convolution with split input channels: a partial output."""
    return forward_with(module, {"bias": None}, input, *args, **kwargs)  # type: ignore[no-any-return]


def _rules(kind: type[nn.Module], dim: int, output: int) -> Iterator[ShardingRule]:
    """Yield the rules of a convolution class, for one group and for several.

    ``dim`` is the dimension of the channels, ``output`` that of the weight's output channels if there is one group.
    """
    name, counts = kind.__name__, ("in_channels", "out_channels", "groups")
    column = Cut({"weight": output, "bias": 0}, "replicated", "sharded", ("out_channels",), dim=dim)
    row = Cut({"weight": 1 - output}, "sharded", "partial", ("in_channels",), without_bias, late_bias=True, dim=dim)
    yield ShardingRule(name, lambda each: computes_as(each, kind) and each.__dict__["groups"] <= 1, (column, row))
    groups = Cut({"weight": 0, "bias": 0}, "sharded", "sharded", counts, fusable=False, dim=dim)
    yield ShardingRule(f"grouped {name}", lambda each: computes_as(each, kind) and each.__dict__["groups"] > 1, (groups,))


RULES = [
    *(
        rule
        for kinds, output in ((_PLAIN, 0), (_TRANSPOSED, 1))
        for spatial, kind in enumerate(kinds, start=1)
        for rule in _rules(kind, -1 - spatial, output)
    ),
    *_BY_CHANNEL,
]
