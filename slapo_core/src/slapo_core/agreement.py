"""Errors that one rank sees fail all ranks, with that rank's message, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import BuildError


def mesh_groups(mesh: DeviceMesh | None) -> Iterator[dist.ProcessGroup]:
    """The process groups of the mesh's axes; a reduction over one after the other is a reduction over the mesh."""
    for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
        group = mesh[axis].get_group() if mesh is not None else None
        if group is not None and dist.get_world_size(group) > 1:
            yield group


def all_reduce(values: torch.Tensor, mesh: DeviceMesh | None, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce a tensor over every rank of the mesh, in place; every rank gets the same bits. Collective."""
    for group in mesh_groups(mesh):
        dist.all_reduce(values, op=op, group=group)
    return values


def gather(value: Any, mesh: DeviceMesh | None) -> list[Any]:
    """One picklable value of every rank of the mesh, the same list on each, in the order of ranks. Collective."""
    values = [value]
    for group in reversed(list(mesh_groups(mesh))):
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, values, group=group)
        values = [item for part in parts for item in part]
    return values


def agree(error: Exception | None, mesh: DeviceMesh | None) -> None:
    """Raise on every rank of the mesh if any of them brings an error. Collective.

    Raises:
        Exception: ``error`` itself on a rank that brings one.
        BuildError: on the others, with the message of the first rank that failed.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    failures = [found for found in gather((rank, _sentence(error)) if error else None, mesh) if found]
    if error is not None:
        raise error
    if failures:
        raise BuildError(f"rank {failures[0][0]} failed: {failures[0][1]}")


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
