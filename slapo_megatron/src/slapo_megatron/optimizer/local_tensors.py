"""A rank's parameters and buffers for Megatron's ``dist_checkpointing``: the position of each part in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import Program, ShardSpec, is_sharded, parameter_facts
from slapo_training.model import boxes, buffers, parameters


class LocalTensors:
    """Tensors that this rank's stages hold, by the first of each tensor's original names.

    Attributes:
        shapes: Full shapes of the tensors of the whole model, the same on every rank.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        own, places = program.axis_rank("pp"), dict[str, set[int]]()
        self.tensors: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, list[int]] = {}
        for stage in program.stages:
            rank = program.rank_of(stage.index)
            for key, tensor in {**parameters(stage.module), **buffers(stage.module)}.items():
                spec = parameter_facts(tensor).spec
                self.shapes[key] = list(spec.full_shape if spec is not None else tensor.shape)
                places.setdefault(key, set()).add(rank)
                if rank == own:
                    self.tensors[key] = tensor
        self._copy = {key: sorted(places[key]).index(own) for key in self.tensors}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {key: tensor for key, tensor in self.tensors.items() if not isinstance(tensor, nn.Parameter)}

    def sharded_tensors(self, tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
        """Return a sharded tensor at the position of the held tensor of the same key; empty tensors are left out."""
        return {key: self._factory(key, tensor, prefix) for key, tensor in tensors.items() if tensor.numel()}

    def replicated_tensors(self, numbers: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
        """Return sharded tensors for values that are the same on all ranks holding a part of their key's tensor."""
        from megatron.core.dist_checkpointing import ShardedTensor

        axes = self.program.axis_rank("tp"), self.program.axis_rank("dp")
        return {
            key: ShardedTensor.from_rank_offsets(prefix + key, number, replica_id=(self._copy[key], *axes))
            for key, number in numbers.items()
        }

    def range_tensors(self, ranges: dict[str, tuple[torch.Tensor, int]], prefix: str) -> dict[str, Any]:
        """Return sharded tensors for ranges that this replica alone holds; other replicas hold the rest.

        A range is flat, not empty, and of the held tensor of its key, with the offset in it.
        """
        found: dict[str, Any] = {}
        for key, (values, start) in ranges.items():
            spec, copies = self._spec(key), (*self._copies(key)[:2], 0)
            shape = tuple(self.tensors[key].shape) or (1,)
            at, found[key] = 0, []
            for offset, sizes in boxes(shape, start, start + values.numel()):
                data = values[at : at + math.prod(sizes)].view(sizes)
                found[key] += _parts(prefix + key, data, offset, self.shapes[key] or [1], spec, copies)
                at += data.numel()
        return found

    def _spec(self, key: str) -> ShardSpec | None:
        held = self.tensors[key]
        return parameter_facts(held).spec if is_sharded(held) else None

    def _copies(self, key: str) -> tuple[int, int, int]:
        """Return the number of earlier ranks along each axis that hold the same data."""
        program = self.program
        return self._copy[key], program.axis_rank("tp") if self._spec(key) is None else 0, program.axis_rank("dp")

    def _factory(self, key: str, tensor: torch.Tensor, prefix: str) -> Any:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

        shape, spec, copies = self.tensors[key].shape, self._spec(key), self._copies(key)

        def split(key: str, tensor: torch.Tensor, replica: Any, flattened_range: Any) -> list[Any]:
            data = tensor.detach()
            if spec is None:
                return [ShardedTensor.from_rank_offsets(key, data.view(-1) if data.dim() == 0 else data, replica_id=copies)]
            return [*_parts(key, data, (0,) * data.dim(), spec.full_shape, spec, copies)]

        def merge(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts, spec.dim) if spec is not None else parts[0].view(shape)

        return ShardedTensorFactory(prefix + key, tensor, split, merge, copies)


def _parts(
    key: str, data: torch.Tensor, offset: tuple[int, ...], shape: Sequence[int], spec: ShardSpec | None, copies: tuple[int, ...]
) -> Iterator[Any]:
    """Yield the pieces of a box that are contiguous in the full tensor, each with the number of earlier ranks that hold it.

    ``offset`` is that of the box in this rank's shard. ``copies`` are the numbers of earlier ranks along pp, tp and dp that
    hold the same data.
    """
    if spec is None:
        yield _part(key, data, offset, shape, copies)
        return
    held = [spec.ranges(rank) for rank in range(spec.num_shards)]
    cuts = sorted({edge for ranges in held for each in ranges for edge in each})
    at, dim, begin = 0, spec.dim, offset[spec.dim]
    for start, stop in held[spec.rank]:
        inside = [edge for edge in cuts if start <= edge <= stop]
        for low, high in zip(inside, inside[1:], strict=False):
            before = sum(any(a <= low and high <= b for a, b in ranges) for ranges in held[: spec.rank])
            first, last = max(at, begin), min(at + high - low, begin + data.shape[dim])
            if first < last:
                where = (*offset[:dim], low + first - at, *offset[dim + 1 :])
                yield _part(key, data.narrow(dim, first - begin, last - first), where, shape, (copies[0], before, copies[2]))
            at += high - low


def _part(key: str, data: torch.Tensor, offset: tuple[int, ...], shape: Sequence[int], copies: tuple[int, ...]) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=tuple(shape),
        global_offset=offset,
        axis_fragmentations=None,
        replica_id=copies,
    )
