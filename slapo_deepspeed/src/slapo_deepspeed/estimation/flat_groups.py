"""Flat tensors of a group of parameters, and the range of them that one replica steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from slapo_training import flatten_parameters

_ALIGNMENT = 2
"""Elements per replica to which ZeRO pads a flat tensor."""


class FlatGroup:
    """One group of the optimizer in stages 1 and 2 of ZeRO.

    Args:
        module: The stage, with fake tensors; its parameters become views of the flat tensor.
        parameters: Parameters of the group, in order.
        replicas: Number of data-parallel ranks.
        replica: The replica; None for the one whose range touches parameters with the most elements.

    Attributes:
        parameters: The views, in order.
        flat: Flat tensor of the parameters, padded.
        main: Flat fp32 tensor of this replica's range, which the optimizer steps.
        own: Parameters with elements in the range.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], replicas: int, replica: int | None) -> None:
        sizes = [each.numel() for each in parameters]
        self._starts = [*accumulate(sizes, initial=0)]
        step = -(-self._starts[-1] // (_ALIGNMENT * replicas)) * _ALIGNMENT
        self.flat = parameters[0].new_empty(step * replicas)
        views = flatten_parameters(module, self.flat, zip(parameters, self._starts, strict=False))
        self.parameters = [views[id(each)] for each in parameters]
        self._step = step
        touched = [sum(sizes[index] for index in self._touched_parameters(rank)) for rank in range(replicas)]
        self._replica = touched.index(max(touched)) if replica is None else replica
        self.main = nn.Parameter(self.flat.new_empty(step, dtype=torch.float32))
        self.own = [self.parameters[index] for index in self._touched_parameters(self._replica)]
        self._own = {id(each) for each in self.own}

    def _touched_parameters(self, replica: int) -> list[int]:
        low, high = replica * self._step, (replica + 1) * self._step
        pairs = zip(self._starts, self._starts[1:], strict=False)
        return [index for index, (start, stop) in enumerate(pairs) if start < high and stop > low]

    def is_own(self, parameter: nn.Parameter) -> bool:
        """Return True if this replica steps elements of a parameter."""
        return id(parameter) in self._own

    def parts(self, parameter: nn.Parameter) -> Iterator[tuple[int, int]]:
        """Yield the replicas that step elements of a parameter, each with the number of these elements."""
        start = self._starts[next(index for index, each in enumerate(self.parameters) if each is parameter)]
        stop = start + parameter.numel()
        for replica in range(start // self._step, (stop - 1) // self._step + 1):
            low = replica * self._step
            yield replica, min(stop, low + self._step) - max(start, low)

    def own_range(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of the own parameters' gradients that lie in the range, padded to its size."""
        parts, at = [], 0
        low = self._replica * self._step
        for parameter, gradient in zip(self.own, gradients, strict=True):
            start = self._starts[next(index for index, each in enumerate(self.parameters) if each is parameter)]
            first = max(low - start, 0)
            count = min(parameter.numel() - first, self._step - at)
            part = gradient
            if first > 0 or count < parameter.numel():
                part = gradient.contiguous().view(-1).narrow(0, first, count)
            parts.append(part)
            at += count
        if at < self._step:
            parts.append(self.flat.new_zeros(self._step - at))
        return parts


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one flat tensor; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([each.contiguous().view(-1) for each in tensors])


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state."""
    found: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return [each for each in found if isinstance(each, torch.Tensor)]


def bucket_sizes(sizes: Iterable[int], limit: int) -> Iterator[int]:
    """Yield the sums of consecutive sizes, each ended by the size with which it exceeds a limit."""
    total = 0
    for size in sizes:
        total += size
        if total > limit:
            yield total
            total = 0
    if total:
        yield total
