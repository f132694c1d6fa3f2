"""Agreement between ranks: an error of one rank is raised on all ranks, so that none waits forever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..reporting.errors import BuildError

Group = dist.ProcessGroup | None


def mesh_groups(mesh: DeviceMesh | None, group: Group = None) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups of the mesh's axes, and ``group``, without those of one rank.

    A reduction over each in turn is a reduction over all ranks of the mesh.

    Example:
        >>> list(mesh_groups(None))
        []
    """
    axes = [mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()] if mesh is not None else []
    return (each for each in [*axes, group] if each is not None and dist.get_world_size(each) > 1)


def gather_objects(value: Any, mesh: DeviceMesh | None, group: Group = None) -> list[Any]:
    """Return a list of one picklable value of every rank of the mesh and ``group``, in rank order, equal on each.
    Collective.

    Example:
        >>> gather_objects("here", mesh=None)
        ['here']
    """
    values = [value]
    for each in reversed(list(mesh_groups(mesh, group))):
        parts: list[Any] = [None] * dist.get_world_size(each)
        dist.all_gather_object(parts, values, group=each)
        values = [item for part in parts for item in part]
    return values


def raise_on_all_ranks(error: Exception | None, mesh: DeviceMesh | None, group: Group = None) -> None:
    """Raise on every rank of the mesh and ``group`` if any of them passes an error. Collective.

    Raises:
        Exception: ``error`` itself on a rank that passes one.
        BuildError: on the other ranks, with the message of the first rank that failed.

    Example:
        >>> raise_on_all_ranks(None, mesh=None)
        >>> raise_on_all_ranks(ValueError("no data"), mesh=None)
        Traceback (most recent call last):
        ValueError: no data
    """
    reason = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
    failures = [found for found in gather_objects((_global_rank(), reason) if error else None, mesh, group) if found]
    if error is not None:
        raise error
    if failures:
        raise BuildError(f"rank {failures[0][0]} failed: {failures[0][1]}")


@contextmanager
def agree_on_error(mesh: DeviceMesh | None, group: Group = None) -> Iterator[None]:
    """Raise an error of a ``with`` block on every rank of the mesh and ``group``, see ``raise_on_all_ranks``. Collective at
    the end of the block, which must not communicate.

    Example:
        >>> with agree_on_error(mesh=None):
        ...     raise ValueError("no data")
        Traceback (most recent call last):
        ValueError: no data
    """
    error = None
    try:
        yield
    except Exception as err:
        error = err
    raise_on_all_ranks(error, mesh, group)


def compare_across_ranks(lines: Sequence[str], mesh: DeviceMesh | None, group: Group = None) -> None:
    """Raise on every rank of the mesh and ``group`` unless all pass the same lines. Collective.

    Raises:
        BuildError: with the first line that differs, as each rank has it; the same message on every rank.

    Example:
        >>> compare_across_ranks(["step 1, sch.shard('weight', 0)"], mesh=None)
    """
    # Hashes are compared first; the lines are sent only if these differ.
    if len(set(gather_objects(hashlib.sha256("\0".join(lines).encode()).digest(), mesh, group))) == 1:
        return
    ranks, everyone = zip(*sorted(dict(gather_objects((_global_rank(), list(lines)), mesh, group)).items()), strict=True)
    found = next(line for line in zip_longest(*everyone, fillvalue="nothing more") if len(set(line)) > 1)
    holders = {text: [rank for rank, own in zip(ranks, found, strict=True) if own == text] for text in found}
    differing = " and ".join(f"{text[:200]} on {_format_ranks(numbers)}" for text, numbers in holders.items())
    raise BuildError(f"the ranks have different schedules: {differing}; give every rank the same model, steps and options")


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _format_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"
