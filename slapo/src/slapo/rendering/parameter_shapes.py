"""Local and whole shape of a parameter, and the ranks it is split over."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from slapo_core import shard_spec


class ParameterShape(NamedTuple):
    """Shapes of one parameter or buffer.

    Args:
        local: On this rank.
        whole: In the unmodified model.
        split: Mesh axes it is split over, with their sizes, e.g. ``("tp 4",)``.
    """

    local: tuple[int, ...]
    whole: tuple[int, ...]
    split: tuple[str, ...]

    @classmethod
    def of(cls, tensor: Any) -> ParameterShape | None:
        """Return the shapes of a shard, a DTensor, a parameter of ZeRO-3 or a plain tensor; None before it has any."""
        if is_lazy(tensor):
            return None
        local = whole = tuple(tensor.shape)
        split: list[str] = []
        if (partitioned := getattr(tensor, "ds_shape", None)) is not None and tuple(partitioned) != whole:
            local, whole, split = tuple(tensor.ds_tensor.shape), tuple(partitioned), ["ZeRO-3"]  # a range of the flat tensor
        if hasattr(tensor, "placements"):
            local, split = _local_shape(tensor), _mesh_axes(tensor)
        if (spec := shard_spec(tensor)) is not None and spec.num_shards > 1:
            whole, split = spec.full_shape, [*split, f"{spec.axis} {spec.num_shards}"]
        return cls(local, whole, tuple(split))

    @property
    def held(self) -> int:
        """Numbers on this rank."""
        return math.prod(self.local)

    @property
    def total(self) -> int:
        """Numbers of the whole parameter."""
        return math.prod(self.whole)

    def __str__(self) -> str:
        if len(self.local) == len(self.whole):
            sizes = zip(self.local, self.whole, strict=True)
            dims = f"[{', '.join(str(part) if part == size else f'{part} of {size}' for part, size in sizes)}]"
        else:
            dims = f"{list(self.local)} of {list(self.whole)}"
        return f"{dims} {' '.join(self.split)}".rstrip()


@torch.no_grad()
def _local_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.to_local().shape)


def _mesh_axes(tensor: Any) -> list[str]:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"axis {dim}:" for dim in range(mesh.ndim)]
    placed = zip(names, mesh.shape, tensor.placements, strict=True)
    return [f"{name} {size}" for name, size, placement in placed if placement.is_shard() and size > 1]
