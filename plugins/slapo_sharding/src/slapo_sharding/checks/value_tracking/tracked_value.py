"""Layouts of sharded and partial values, without data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ...communication.collectives import Group

_OTHERS = frozenset("to type_as expand_as view_as reshape_as".split())


@dataclass(frozen=True)
class Layout:
    """Hashable metadata and placement of a tensor.

    Args:
        shape: Local shape.
        stride: Local stride.
        dtype: The dtype.
        device: The device.
        placement: None for a tensor that is not tracked.
        ranks: Number of ranks of the placement.
        whole: Global shape and stride.
        blocks: Local sizes of the blocks of a fused sharded dimension; empty for one block.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placement: Placement | None = None
    ranks: int = 1
    whole: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    blocks: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        """Sharded dimension."""
        return self.placement.dim  # type: ignore[union-attr, no-any-return]

    def empty(self, mesh: DeviceMesh) -> torch.Tensor:
        """Return a meta tensor of this layout, a DTensor if it is tracked."""
        part = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.placement is None:
            return part
        shape, stride = self.whole
        return DTensor.from_local(part, mesh, [self.placement], run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass(frozen=True)
class TrackedValue:
    """Sharded or partial value.

    Args:
        layout: Its layout.
        owner: The layer or synced module that made it.
        group: The ranks of the layout.
    """

    layout: Layout
    owner: nn.Module
    group: Group

    @property
    def is_partial(self) -> bool:
        """True if the value is partial."""
        return self.layout.placement is not None and self.layout.placement.is_partial()


def untracked_layout(x: torch.Tensor) -> Layout:
    """Return the layout of a tensor that is not tracked."""
    return Layout(x.shape, x.stride(), x.dtype, x.device)


def sharded_layout(x: torch.Tensor, dim: int, ranks: int, blocks: tuple[int, ...] = ()) -> Layout:
    """Return the layout of a value whose local shard along ``dim`` is ``x``."""
    sizes, steps = list(x.shape), x.stride()
    sizes[dim] *= ranks
    strides = [step * ranks if place != dim and step >= steps[dim] else step for place, step in enumerate(steps)]
    return Layout(x.shape, steps, x.dtype, x.device, Shard(dim), ranks, (tuple(sizes), tuple(strides)), blocks)


def from_dtensor(made: DTensor, device: torch.device, blocks: tuple[int, ...] = ()) -> Layout:
    """Return the layout of a DTensor on meta, for a tensor on ``device``."""
    part, ranks, whole = made.to_local(), made.device_mesh.size(), (tuple(made.shape), made.stride())
    return Layout(part.shape, part.stride(), part.dtype, device, made.placements[0], ranks, whole, blocks)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of torch functions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def reads_metadata_only(name: str) -> bool:
    """Return whether a function reads only the type or the shape of tensors after the first one."""
    return name in _OTHERS


def makes_new(name: str) -> bool:
    """Return whether a function makes a new tensor of another one's type, such as ``x.new_zeros(3)``."""
    return name.startswith("new_")
