"""Rules for norms and activations that treat each channel, or group of channels, separately; their input is sharded likewise.

``LayerNorm`` and similar norms need the whole last dimension and stay replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .sharding_rule import Cut, ShardingRule, computes_as

_BATCH: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
"""Classes to the number of dimensions of a batch."""
_STATE = ("weight", "bias", "running_mean", "running_var")


def _rule(kind: str, matches: Callable[[Any], bool], names: Iterable[str], *counts: str) -> ShardingRule:
    return ShardingRule(kind, matches, (Cut(dict.fromkeys(names, 0), "sharded", "sharded", counts, fusable=False, dim=1),))


# no ``SyncBatchNorm``, which would mix the ranks' channels, and no PReLU with one slope for all channels
RULES = (
    _rule("BatchNorm", lambda module: computes_as(module, *_BATCH), _STATE, "num_features"),
    _rule("GroupNorm", lambda module: computes_as(module, nn.GroupNorm), ("weight", "bias"), "num_channels", "num_groups"),
    _rule("InstanceNorm", lambda module: computes_as(module, *_INSTANCE), _STATE, "num_features"),
    _rule("PReLU", lambda each: computes_as(each, nn.PReLU) and each.num_parameters > 1, ("weight",), "num_parameters"),
)


def is_by_channel(module: nn.Module) -> bool:
    """Return whether a module is covered by one of these rules: its channels are dimension 1."""
    return any(rule.matches(module) for rule in RULES)


def counts_channels_only(module: nn.Module) -> bool:
    """Return whether a module norms single channels and has no tensors, only their number ``num_features``."""
    held = (*module._parameters.values(), *module._buffers.values())
    return all(each is None for each in held) and computes_as(module, *_INSTANCE, *_BATCH)


def has_batch(module: nn.Module, dims: int) -> bool:
    """Return whether a norm treats a value of ``dims`` dimensions as a batch; InstanceNorm takes unbatched values too."""
    batched = next((size for kind, size in _INSTANCE.items() if isinstance(module, kind)), dims)
    return dims == batched
