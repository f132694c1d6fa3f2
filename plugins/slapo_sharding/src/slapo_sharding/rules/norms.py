"""Rules for norms and activations that treat each channel, or group of channels, separately; their input is sharded likewise.

``LayerNorm`` and similar norms need the whole last dimension and stay replicated.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .sharding_rule import Cut, ShardingRule, computes_as

_BATCH: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
"""Classes to the number of dimensions of a batch."""
_STATE = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}


def is_batch_norm(module: Any) -> bool:
    """Return whether a module is a BatchNorm; not a ``SyncBatchNorm``, which would mix the ranks' channels."""
    return computes_as(module, *_BATCH)


def is_group_norm(module: Any) -> bool:
    """Return whether a module is a GroupNorm."""
    return computes_as(module, nn.GroupNorm)


def is_instance_norm(module: Any) -> bool:
    """Return whether a module is an InstanceNorm."""
    return computes_as(module, *_INSTANCE)


def is_channel_prelu(module: Any) -> bool:
    """Return whether a module is a PReLU with a slope for each channel."""
    return computes_as(module, nn.PReLU) and module.num_parameters > 1


def is_by_channel(module: Any) -> bool:
    """Return whether a module is covered by one of these rules: its channels are dimension 1."""
    return any(matches(module) for matches in (is_batch_norm, is_group_norm, is_instance_norm, is_channel_prelu))


BATCH_NORM = ShardingRule(
    "BatchNorm", is_batch_norm, (Cut(_STATE, "sharded", "sharded", ("num_features",), fusable=False, dim=1),)
)
GROUP_NORM = ShardingRule(
    "GroupNorm",
    is_group_norm,
    (Cut({"weight": 0, "bias": 0}, "sharded", "sharded", ("num_channels", "num_groups"), fusable=False, dim=1),),
)
INSTANCE_NORM = ShardingRule(
    "InstanceNorm", is_instance_norm, (Cut(_STATE, "sharded", "sharded", ("num_features",), fusable=False, dim=1),)
)
PRELU = ShardingRule(
    "PReLU",
    is_channel_prelu,
    (Cut({"weight": 0}, "sharded", "sharded", ("num_parameters",), fusable=False, dim=1),),
)


def counts_channels_only(module: Any) -> bool:
    """Return whether a module norms single channels and has no tensors, only their number ``num_features``."""
    held = (*module._parameters.values(), *module._buffers.values())
    return all(each is None for each in held) and (is_instance_norm(module) or is_batch_norm(module))


def has_batch(module: nn.Module, dims: int) -> bool:
    """Return whether a norm treats a value of ``dims`` dimensions as a batch; InstanceNorm takes unbatched values too."""
    batched = next((size for kind, size in _INSTANCE.items() if isinstance(module, kind)), dims)
    return dims == batched


RULES = (BATCH_NORM, GROUP_NORM, INSTANCE_NORM, PRELU)
