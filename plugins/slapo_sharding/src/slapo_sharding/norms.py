"""Rules for norms that treat channels, or groups of channels, each for itself, on an input that is sharded along its channels.

``LayerNorm`` and its kin look at all of the last dimension and stay whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .rules import Cut, ShardingRule, computes_as

_BATCH: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATE = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}


def is_batch_norm(module: Any) -> bool:
    """A BatchNorm; ``SyncBatchNorm``, which would mix the ranks' channels over the default group, is none."""
    return computes_as(module, *_BATCH)


def is_group_norm(module: Any) -> bool:
    """A GroupNorm."""
    return computes_as(module, nn.GroupNorm)


BATCH_NORM = ShardingRule(
    "BatchNorm", is_batch_norm, (Cut(_STATE, "sharded", "sharded", ("num_features",), fusable=False, dim=1),)
)
GROUP_NORM = ShardingRule(
    "GroupNorm",
    is_group_norm,
    (Cut({"weight": 0, "bias": 0}, "sharded", "sharded", ("num_channels", "num_groups"), fusable=False, dim=1),),
)
RULES = (BATCH_NORM, GROUP_NORM)
