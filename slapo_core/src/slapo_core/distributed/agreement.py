"""Errors that one rank sees fail all ranks, with that rank's message, and nobody waits for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..reporting.errors import BuildError

Group = dist.ProcessGroup | None


def mesh_groups(mesh: DeviceMesh | None, group: Group = None) -> Iterator[dist.ProcessGroup]:
    """The process groups of the mesh's axes, and ``group``; reducing over each in turn reduces over all ranks."""
    axes = [mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()] if mesh is not None else []
    return (each for each in [*axes, group] if each is not None and dist.get_world_size(each) > 1)


def all_reduce(values: torch.Tensor, mesh: DeviceMesh | None, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce a tensor over every rank of the mesh, in place; every rank gets the same bits. Collective."""
    for group in mesh_groups(mesh):
        dist.all_reduce(values, op=op, group=group)
    return values


def gather_objects(value: Any, mesh: DeviceMesh | None, group: Group = None) -> list[Any]:
    """One picklable value of every rank of the mesh, the same list on each, in the order of ranks. Collective."""
    values = [value]
    for each in reversed(list(mesh_groups(mesh, group))):
        parts: list[Any] = [None] * dist.get_world_size(each)
        dist.all_gather_object(parts, values, group=each)
        values = [item for part in parts for item in part]
    return values


def raise_on_all_ranks(error: Exception | None, mesh: DeviceMesh | None, group: Group = None) -> None:
    """Raise on every rank of the mesh, and of ``group``, if any of them brings an error. Collective.

    Raises:
        Exception: ``error`` itself on a rank that brings one.
        BuildError: on the others, with the message of the first rank that failed.
    """
    failures = [found for found in gather_objects((_rank(), _sentence(error)) if error else None, mesh, group) if found]
    if error is not None:
        raise error
    if failures:
        raise BuildError(f"rank {failures[0][0]} failed: {failures[0][1]}")


def compare_across_ranks(lines: Sequence[str], mesh: DeviceMesh | None, group: Group = None) -> None:
    """Raise on every rank of the mesh, and of ``group``, unless all bring the same lines. Collective.

    Raises:
        BuildError: with the first line that differs, as each rank has it; the same sentence on every rank.
    """
    # Only where ranks differ do the lines themselves travel.
    if len(set(gather_objects(hashlib.sha256("\0".join(lines).encode()).digest(), mesh, group))) == 1:
        return
    ranks, everyone = zip(*sorted(dict(gather_objects((_rank(), list(lines)), mesh, group)).items()), strict=True)
    found = next(line for line in zip_longest(*everyone, fillvalue="nothing more") if len(set(line)) > 1)
    holders = {text: [rank for rank, own in zip(ranks, found, strict=True) if own == text] for text in found}
    differing = " and ".join(f"{text[:200]} on {_named(numbers)}" for text, numbers in holders.items())
    raise BuildError(f"the ranks have different schedules: {differing}; give every rank the same model, steps and options")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
