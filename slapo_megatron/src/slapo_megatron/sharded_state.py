"""A rank's parameters and buffers as Megatron's ``dist_checkpointing`` wants them: where each part lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_core.parameters import ShardSpec, facts, is_part
from slapo_core.program import Program


class Held:
    """What this rank's stages hold, by the first of its original names.

    Args:
        program: Whose stages.

    Attributes:
        tensors: Parameters and the buffers that are saved.
        shapes: Those of the whole tensors of the whole model, the same on every rank.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        own, places = program.axis_rank("pp"), dict[str, set[int]]()
        self.tensors: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, list[int]] = {}
        for stage in program.stages:
            rank = program.rank_of(stage.index)
            for name, tensor in _saved(stage.module):
                key = (facts(tensor).names or program.original_names.get(name) or (name,))[0]
                spec = facts(tensor).spec
                self.shapes[key] = list(spec.full_shape if spec is not None else tensor.shape)
                places.setdefault(key, set()).add(rank)
                if rank == own:
                    self.tensors[key] = tensor
        self._copy = {key: sorted(places[key]).index(own) for key in self.tensors}

    def sharded(self, tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
        """These tensors, each in the place of one that is held, for Megatron.

        Args:
            tensors: By the keys of those held.
            prefix: Of the names in the checkpoint.
        """
        return {key: self._one(key, tensor, prefix) for key, tensor in tensors.items()}

    def alike(self, numbers: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
        """Tensors that are the same on all ranks that hold something of these keys."""
        from megatron.core.dist_checkpointing import ShardedTensor

        axes = self._program.axis_rank("tp"), self._program.axis_rank("dp")
        return {
            key: ShardedTensor.from_rank_offsets(prefix + key, number, replica_id=(self._copy[key], *axes))
            for key, number in numbers.items()
        }

    def _one(self, key: str, tensor: torch.Tensor, prefix: str) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

        held = self.tensors[key]
        spec = facts(held).spec if is_part(held) else None
        copies = (self._copy[key], self._program.axis_rank("tp") if spec is None else 0, self._program.axis_rank("dp"))

        def taken_apart(key: str, tensor: torch.Tensor, replica: Any, flattened_range: Any) -> list[Any]:
            return [*_parts(key, tensor, spec, copies)]

        def put_together(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts, spec.dim) if spec is not None else parts[0].view(held.shape)

        return ShardedTensorFactory(prefix + key, tensor, taken_apart, put_together, copies)


def _parts(key: str, tensor: torch.Tensor, spec: ShardSpec | None, copies: tuple[int, int, int]) -> Iterator[Any]:
    """The pieces of one tensor that are whole ranges of the full one, each with how many other ranks come before with it."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if spec is None:
        data = tensor.detach().view(-1) if tensor.dim() == 0 else tensor.detach()
        yield ShardedTensor.from_rank_offsets(key, data, replica_id=copies)
        return
    held = [spec.ranges(rank) for rank in range(spec.num_shards)]
    cuts = sorted({edge for ranges in held for each in ranges for edge in each})
    at = 0
    for start, stop in held[spec.rank]:
        inside = [edge for edge in cuts if start <= edge <= stop]
        for low, high in zip(inside, inside[1:], strict=False):
            before = sum(any(a <= low and high <= b for a, b in ranges) for ranges in held[: spec.rank])
            data = tensor.detach().narrow(spec.dim, at, high - low)
            offset = tuple(low if dim == spec.dim else 0 for dim in range(tensor.dim()))
            yield ShardedTensor(
                key=key,
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_shape=tuple(spec.full_shape),
                global_offset=offset,
                axis_fragmentations=None,
                replica_id=(copies[0], before, copies[2]),
            )
            at += high - low


def _saved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that a state dict has."""
    yield from module.named_parameters()
    kept = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)
