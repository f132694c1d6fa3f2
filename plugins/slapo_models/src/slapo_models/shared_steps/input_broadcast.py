"""``bcast_input``: all ranks of a tensor-parallel group take the inputs of its first."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Schedule, ScheduleError, get_logger, shard_spec

from .configuration import Configuration


def broadcast_input(schedule: Schedule, config: Configuration) -> None:
    """Let the model take its inputs from the first rank of the group, where there are several and no stages."""
    if not config.bcast_input or schedule.world_size <= 1:
        return
    if config.pipeline_cuts:
        message = "apply_schedule(%r): bcast_input takes no step: a pipeline reads its batch on every rank, and compares them"
        get_logger().info(message, config.key)
        return
    schedule.sync("fwd_pre", broadcast_from_first)


def broadcast_from_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Forward pre-hook: the tensors among the arguments as the first rank of the group has them.

    The group is that of the module's shards; without any the module is whole on every rank, and nothing is sent.

    Raises:
        ScheduleError: a tensor needs a gradient, which would not come back.
    """
    group = _group_of(module)
    if group is None:
        return args, kwargs
    named = {name: _broadcast_tensors(name, value, group) for name, value in kwargs.items()}
    return tuple(_broadcast_tensors(index, value, group) for index, value in enumerate(args)), named


def _broadcast_tensors(name: object, value: Any, group: dist.ProcessGroup) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.requires_grad:
        message = f"the input {name!r} needs a gradient, which a broadcast does not carry"
        raise ScheduleError(f"{message}; leave bcast_input out, and give every rank the same inputs", primitive="sync")
    received = value.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(received, dist.get_global_rank(group, 0), group)
    return received


def _group_of(module: nn.Module) -> dist.ProcessGroup | None:
    specs = (shard_spec(tensor) for tensor in chain(module.parameters(), module.buffers()))
    return next((spec.group for spec in specs if spec is not None and spec.group is not None), None)
