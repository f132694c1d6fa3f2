"""Check that replicated parameters are equal on all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from slapo_core import Schedule, is_sharded

from ..examples.case import ConformanceError


def check_replicas(schedule: Schedule) -> None:
    """Check that parameters without a shard specification are equal on all ranks. Collective.

    Raises:
        ConformanceError: on all ranks, if one differs.
    """
    if not dist.is_initialized() or dist.get_world_size(schedule.group) == 1:
        return
    mine = {name: _digest(tensor) for name, tensor in schedule.mod.named_parameters() if _is_whole(tensor)}
    found: list[Any] = [None] * dist.get_world_size(schedule.group)
    dist.all_gather_object(found, mine, group=schedule.group)
    for rank, theirs in enumerate(found):
        if apart := sorted(name for name, digest in found[0].items() if theirs.get(name, digest) != digest):
            raise ConformanceError(
                f"the parameter {apart[0]!r}, which is not sharded, is another one on rank {rank} than on rank 0"
            )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is replicated and has values."""
    return not (is_sharded(tensor) or is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided)


def _digest(tensor: torch.Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()
    return hashlib.blake2b(bytes(numbers), digest_size=8).hexdigest() + str((tuple(tensor.shape), tensor.dtype))
