"""The memory of the first gradients of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

MemoryExtent = tuple[str, int, int]
"""Memory of a tensor: device, address of the first byte, and address after the last byte."""


def memory_extents(tensors: Iterable[torch.Tensor | None]) -> list[MemoryExtent]:
    """Return the memory extents of dense tensors with elements."""
    return [_extent(tensor) for tensor in tensors if tensor is not None and _is_plain(tensor)]


class GradientUnaliasing:
    """Separation of a step's first gradients that share memory.

    Autograd and the pipeline runtime keep a parameter's first gradient as the backward made it. Its memory may also be that of
    another parameter's gradient, or of a gradient that a stage has yet to send. Later micro-batches would accumulate into both.
    """

    def __init__(self, module: nn.Module) -> None:
        self._waiting = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.grad is None]

    def separate(self, kept: Iterable[MemoryExtent] = ()) -> None:
        """Copy new gradients that share memory with each other, with ``kept``, or between elements; call after a backward."""
        new = [parameter for parameter in self._waiting if parameter.grad is not None]
        if not new:
            return
        self._waiting = [parameter for parameter in self._waiting if parameter.grad is None]
        found = [(_extent(p.grad), p) for p in new if p.grad is not None and _is_plain(p.grad)]
        places: list[tuple[MemoryExtent, nn.Parameter | None]] = [*found, *((extent, None) for extent in kept)]
        group: list[nn.Parameter | None] = []
        device, end = "", 0
        for extent, parameter in sorted(places, key=lambda place: place[0]):
            if extent[0] != device or extent[1] >= end:
                _copy(group)
                group, (device, _, end) = [], extent
            group.append(parameter)
            end = max(end, extent[2])
        _copy(group)


def _copy(group: list[nn.Parameter | None]) -> None:
    """Copy the gradients of a group that overlaps in memory; None stands for memory that is kept."""
    for parameter in group:
        if parameter is not None and (gradient := parameter.grad) is not None:
            _, start, end = _extent(gradient)
            if len(group) > 1 or end - start < gradient.nbytes:
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _extent(tensor: torch.Tensor) -> MemoryExtent:
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
