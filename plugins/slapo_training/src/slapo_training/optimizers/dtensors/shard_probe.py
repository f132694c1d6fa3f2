"""Collective probe of an optimizer on DTensors: tests that its arithmetic steps shards and sends statistics only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...distributed._torch_private import MessageWatch
from ..introspection.nested_optimizers import Optimizer, optimizers_in
from ..probe.probe_runs import Cut, ProbeRuns, Size, is_close, isolate
from ..probe.update_probe import sizes_of
from ..whole_tensors.whole_tensor import local_of
from .optimizer_state import check_normalized, normalize_state, step_state

_STATISTIC = 2**10
"""Number of elements of the largest allowed message; DTensor may gather a smaller parameter instead of reducing it."""


def steps_shards(optimizer: Optimizer, mesh: DeviceMesh) -> bool:
    """Return True if a new optimizer steps shards like whole parameters, without gathering them. Collective over the mesh.

    Small copies are stepped, all sharded or some; after each phase the state goes through the form of a checkpoint.
    """
    group, device = mesh.get_group(), mesh.device_type
    with isolate():
        sizes = [_divisible(size, mesh.size()) for size in reversed(sizes_of(optimizer))]
        all_runs = [ProbeRuns(optimizer, size) for size in sizes]
        kinds: list[Any] = [None] * mesh.size()
        dist.all_gather_object(kinds, [(type(optimizer).__qualname__, each.shapes) for each in all_runs], group=group)
        if any(kind != kinds[0] for kind in kinds):
            return False
        for runs in all_runs:
            is_right = torch.tensor(int(_is_right(runs, mesh)), device=device)
            dist.all_reduce(is_right, dist.ReduceOp.MIN, group=group)
            if not is_right.item():
                return False
    return True


def _is_right(runs: ProbeRuns, mesh: DeviceMesh) -> bool:
    """Return True if this rank's shards are stepped right. Collective; an error occurs at the same point on all ranks."""
    try:
        whole = runs.run_first()
        if runs.is_sparse or runs.draws:
            return False
        number = len(runs.shapes)
        ways = [
            _shard_functions(mesh, [0] * number),
            *(_shard_functions(mesh, [1 if at % 2 == odd else None for at in range(number)]) for odd in (0, 1)),
        ]
        found = True
        for cuts in ways:
            with MessageWatch(max(_STATISTIC, *(max(shape, default=1) for shape in runs.shapes))):
                added = runs.run(cuts, after_step=_after_step)
            pairs = [(part, cuts[at % number](full)) for at, (part, full) in enumerate(zip(added, whole, strict=True))]
            found &= all(is_close(local_of(part), local_of(full)) for part, full in pairs)
    except Exception:
        return False
    return found


def _after_step(optimizer: Optimizer, is_last: bool) -> None:
    normalize_state(optimizer)
    check_normalized(optimizer)
    if is_last:
        for each in optimizers_in(optimizer):
            for parameter, state in each.state.items():
                if isinstance(parameter, DTensor):
                    elements = {key: value for key, value in state.items() if _is_sharded(value, parameter)}
                    rest = {key: local_of(value) for key, value in state.items() if key not in elements}
                    each.state[parameter] = step_state(
                        parameter, {key: local_of(value) for key, value in elements.items()}, rest
                    )


def _is_sharded(value: Any, parameter: DTensor) -> bool:
    return isinstance(value, DTensor) and value.shape == parameter.shape


def _divisible(size: Size, ranks: int) -> Size:
    shapes = {
        number: (*(-(-length // ranks) * ranks for length in shape[:2]), *shape[2:]) for number, shape in size.shapes.items()
    }
    return Size(shapes, size.steps)


def _shard_functions(mesh: DeviceMesh, dims: Sequence[int | None]) -> list[Cut]:
    """Return for each parameter the function that shards it along a dimension; None keeps it whole."""

    def shard_copy(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        dim = min(dim, tensor.dim() - 1)
        local = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    return [(lambda tensor: tensor) if dim is None else partial(shard_copy, dim=dim) for dim in dims]
