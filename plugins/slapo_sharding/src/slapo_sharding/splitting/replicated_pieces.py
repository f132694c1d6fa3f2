"""Parameters of which ranks hold copies: each copy sees a part of the gradient and gets the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_core import ShardSpec
from slapo_training.gradient_hooks import register_first

from ..communication import collectives


class PieceReductionHook:
    """A hook of a parameter: each micro-batch's gradient is summed over all that hold the same, on this rank as well.

    Only what lies between the first and the last copy is sent: of a fused projection the keys and values.

    Args:
        spec: How the parameter is sharded.
    """

    of_schedule = True  # not the user's

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        held = torch.zeros(spec.full_shape[spec.dim], dtype=torch.int64)
        for start, stop in (part for rank in range(spec.num_shards) for part in spec.ranges(rank)):
            held[start:stop] += 1
        copied = (held > 1).nonzero()
        self.start, self.stop = int(copied[0]), int(copied[-1]) + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceReductionHook:
        return self

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            return None
        dim, places = self.spec.dim, list(self._places())
        shape = [*grad.shape[:dim], self.stop - self.start, *grad.shape[dim + 1 :]]
        total = grad.new_zeros(shape)
        for own, common, size in places:
            total.narrow(dim, common, size).add_(grad.narrow(dim, own, size))
        total, summed = collectives.all_reduce(total, self.spec.group), grad.clone()
        for own, common, size in places:
            summed.narrow(dim, own, size).copy_(total.narrow(dim, common, size))
        return summed

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over the pieces: the start on this rank, the start in the message, and the size of each."""
        offset = 0
        for start, stop in self.spec.ranges():
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                yield offset + low - start, low - self.start, high - low
            offset += stop - start


def reduce_replicated_pieces(parameter: nn.Parameter, spec: ShardSpec) -> PieceReductionHook:
    """Let every copy that the parameter holds get the whole gradient, also when it is unfrozen only later."""
    frozen, hook = not parameter.requires_grad, PieceReductionHook(spec)
    parameter.requires_grad_(True)  # torch takes hooks of no other
    register_first(parameter, hook)
    parameter.requires_grad_(not frozen)
    return hook


def has_replicated_pieces(spec: ShardSpec) -> bool:
    """Return whether a part of the parameter is held more than once."""
    return spec.dealt is not None and sum(spec.sizes) > spec.full_shape[spec.dim]
