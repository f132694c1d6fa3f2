"""What is known of a value of which each rank has a part, without its numbers."""

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
    """A tensor without its numbers, and how it is sharded; it can be remembered.

    Args:
        shape: Of this rank's part.
        stride: Of the same.
        dtype: Of its numbers.
        device: Where it is.
        placement: None for a tensor that is not followed.
        ranks: How many have a part.
        whole: Shape and stride of all parts together.
        blocks: Sizes on this rank of the blocks that the sharded dimension is made of; empty for one.
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
        """The sharded dimension."""
        return self.placement.dim  # type: ignore[union-attr, no-any-return]

    def empty(self, mesh: DeviceMesh) -> torch.Tensor:
        """The tensor on the meta device: one of a sharded value stands for all ranks' parts."""
        part = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.placement is None:
            return part
        shape, stride = self.whole
        return DTensor.from_local(part, mesh, [self.placement], run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass(frozen=True)
class TrackedValue:
    """A sharded value.

    Args:
        layout: Of all ranks' parts together.
        owner: The layer it comes from.
        group: The ranks that have parts.
    """

    layout: Layout
    owner: nn.Module
    group: Group

    @property
    def is_part_of_sum(self) -> bool:
        """Whether the sum of what the ranks have is meant."""
        return self.layout.placement is not None and self.layout.placement.is_partial()


def untracked(x: torch.Tensor) -> Layout:
    """Of a tensor that is not followed."""
    return Layout(x.shape, x.stride(), x.dtype, x.device)


def sharded(x: torch.Tensor, dim: int, ranks: int, blocks: tuple[int, ...] = ()) -> Layout:
    """Of a value that each of the ranks has such a part of, along a dimension."""
    sizes, steps = list(x.shape), x.stride()
    sizes[dim] *= ranks
    strides = [step * ranks if place != dim and step >= steps[dim] else step for place, step in enumerate(steps)]
    return Layout(x.shape, steps, x.dtype, x.device, Shard(dim), ranks, (tuple(sizes), tuple(strides)), blocks)


def from_dtensor(made: DTensor, device: torch.device, blocks: tuple[int, ...] = ()) -> Layout:
    """Of what torch's rules say a value is."""
    part, ranks, whole = made.to_local(), made.device_mesh.size(), (tuple(made.shape), made.stride())
    return Layout(part.shape, part.stride(), part.dtype, device, made.placements[0], ranks, whole, blocks)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among what torch functions are given and return."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def reads_metadata_only(name: str) -> bool:
    """Whether a function takes no more than the type or the shape from tensors behind the first one."""
    return name in _OTHERS


def makes_new(name: str) -> bool:
    """Whether a function makes a tensor of its own, of another one's type: ``x.new_zeros(3)``."""
    return name.startswith("new_")
