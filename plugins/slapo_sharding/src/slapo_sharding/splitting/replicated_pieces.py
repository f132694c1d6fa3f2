"""Parameters with pieces that several ranks hold: their partial gradients are reduced, so that the copies stay equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_core import ShardSpec
from slapo_training.gradient_hooks import register_first

from ..communication import collectives


class PieceReductionHook:
    """Hook of a parameter that sums each micro-batch's gradient over all copies of a piece, on this rank as well.

    Only the range from the first to the last replicated piece is sent: the keys and values of a fused projection.

    Args:
        spec: How the parameter is sharded.
    """

    of_schedule = True  # tells engines that it is no hook of the user's

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
        dim, places = self.spec.dim, list(self._piece_ranges())
        shape = [*grad.shape[:dim], self.stop - self.start, *grad.shape[dim + 1 :]]
        total = grad.new_zeros(shape)
        for own, common, size in places:
            total.narrow(dim, common, size).add_(grad.narrow(dim, own, size))
        total, summed = collectives.all_reduce(total, self.spec.group), grad.clone()
        for own, common, size in places:
            summed.narrow(dim, own, size).copy_(total.narrow(dim, common, size))
        return summed

    def _piece_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield the start on this rank, the start in the message, and the size of each piece."""
        offset = 0
        for start, stop in self.spec.ranges():
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                yield offset + low - start, low - self.start, high - low
            offset += stop - start


def reduce_replicated_pieces(parameter: nn.Parameter, spec: ShardSpec) -> PieceReductionHook:
    """Register the hook that reduces the gradients of replicated pieces, also for a frozen parameter, and return it."""
    frozen, hook = not parameter.requires_grad, PieceReductionHook(spec)
    parameter.requires_grad_(True)  # torch accepts hooks only on tensors that require a gradient
    register_first(parameter, hook)
    parameter.requires_grad_(not frozen)
    return hook


def has_replicated_pieces(spec: ShardSpec) -> bool:
    """Return whether ranks hold a piece of the parameter more than once."""
    return spec.uneven_ranges is not None and sum(spec.sizes) > spec.full_shape[spec.dim]
