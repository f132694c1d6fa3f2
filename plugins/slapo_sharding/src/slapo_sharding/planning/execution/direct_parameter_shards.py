"""Shards of parameters that a module's forward uses directly, as in ``x @ self.w``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from slapo_core import Schedule, ShardSpec
from slapo_training.gradient_hooks import move_hooks

from ...rules.sharding_rule import AppliedCut, Cut, record_cut
from ...splitting import persistent_hooks
from ...splitting.shard_step import local_shard
from ..dry_run.split_specs import ParameterSplit


def split_parameters(schedule: Schedule, splits: Mapping[str, ParameterSplit]) -> None:
    """Shard or distribute parameters of a module that runs from a graph, whose graph reduces the results.

    The module is recorded as split with whole inputs and outputs. Checks of its inside were made by the dry run.
    """
    size, rank = schedule.world_size, schedule.rank
    spec = ShardSpec(0, (size,), rank, size, (size,), schedule.group)
    for path, split in splits.items():
        below, _, name = path.rpartition(".")
        handle = schedule[below] if below else schedule
        tensor: nn.Parameter = handle.mod._parameters[name]  # type: ignore[assignment]
        shape, dealt = tuple(tensor.shape), None
        if split.owner is not None:
            dealt = tuple(((0, shape[split.dim] if each == split.owner else 0),) for each in range(size))
        spec = ShardSpec(split.dim, shape, rank, size, split.blocks or (shape[split.dim],), schedule.group, uneven_ranges=dealt)
        schedule.touch(handle.mod)
        handle.set_parameter(name, new := local_shard(tensor, spec))
        move_hooks(new, tensor, spec, handle.places_of(new, (handle.mod, name)))
        persistent_hooks.keep_facts(handle.mod)
    schedule.touch(schedule.mod)
    cut = Cut({path: split.dim for path, split in splits.items()}, "whole", "whole")
    record_cut(schedule.mod, AppliedCut(cut, spec, asked=tuple(splits)))
