"""Packing of stage outputs into the tensor that Megatron sends: one tensor of one type whose gradient comes back.

The stages' plan is known on all ranks and is not sent. Values with a gradient come first, then the bits of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import torch

from slapo_core import Boundary, BuildError


class Layout:
    """Layout of one boundary's values in the carrier, the tensor that is sent.

    Args:
        stage: Index of the stage that returns the values, for errors.
        device: Device that this rank sends from.
    """

    def __init__(self, planned: Sequence[Boundary], dtype: torch.dtype, stage: int, device: torch.device) -> None:
        self._planned, self._dtype, self._stage, self._device = tuple(planned), dtype, stage, device
        self._with_gradient = [index for index, boundary in enumerate(planned) if boundary.requires_grad]
        self._without = [index for index, boundary in enumerate(planned) if not boundary.requires_grad]
        self._sizes = [self._elements(planned[index]) for index in (*self._with_gradient, *self._without)]
        self.size = max(1, sum(self._sizes))

    def _elements(self, boundary: Boundary) -> int:
        """Return the number of carrier elements for one value."""
        number = prod(boundary.shape)
        if boundary.requires_grad:
            return number * (2 if boundary.dtype.is_complex else 1)
        return -(-number * boundary.dtype.itemsize // self._dtype.itemsize)

    def pack(self, values: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Pack the outputs of a stage, in the order of the plan, into a tensor of ``size`` elements, at least the layout's.

        Raises:
            BuildError: a value has another shape or type than planned, or its need for a gradient differs from the plan.
        """
        training = torch.is_grad_enabled()
        for value, boundary in zip(values, self._planned, strict=True):
            _check(value, boundary, self._stage, training)
        wanted = [values[index] for index in self._with_gradient]
        parts = [(torch.view_as_real(each) if each.is_complex() else each).to(self._dtype).reshape(-1) for each in wanted]
        parts += [_bits(values[index].detach().to(self._device), self._dtype) for index in self._without]
        if size > sum(self._sizes):
            parts.append(torch.zeros(size - sum(self._sizes), dtype=self._dtype, device=self._device))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(1, 1, -1)

    def unpack(self, carrier: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = carrier.view(-1)
        rest = flat.numel() - sum(self._sizes)
        parts = torch.split(flat, [*self._sizes, rest] if rest else self._sizes) if self._sizes else ()
        values: dict[int, torch.Tensor] = {}
        for index, part in zip((*self._with_gradient, *self._without), parts, strict=False):
            boundary = self._planned[index]
            values[index] = _from_real(part, boundary) if boundary.requires_grad else _from_bits(part.detach(), boundary)
        return tuple(values[index] for index in range(len(self._planned)))


def carrier_dtype(boundaries: Sequence[Boundary], weights: torch.dtype) -> torch.dtype:
    """Return the type that holds every value with a gradient exactly, or the weights' type if there is none."""
    found = [_real_type(boundary.dtype) for boundary in boundaries if boundary.requires_grad]
    return reduce(torch.promote_types, found) if found else weights


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.made = received.shape, received.new_zeros(())
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, ctx.made.expand(ctx.shape)


def with_zero_gradient(output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return a stage's output, with a backward that gives ``received`` a gradient of zeros even if nothing uses it.

    The previous stage waits for a gradient.
    """
    return _ZeroGradient.apply(output, received)  # type: ignore[no-untyped-call,no-any-return]


def _check(value: torch.Tensor, boundary: Boundary, stage: int, training: bool) -> None:
    wanted = boundary.requires_grad and training
    found = (tuple(value.shape), value.dtype, value.requires_grad and training)
    if found != (planned := (boundary.shape, boundary.dtype, wanted)):
        raise BuildError(
            f"stage {stage} gives {boundary.name!r} with (shape, dtype, requires_grad) {found}, but {planned} was planned"
        )


def _real_type(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _from_real(part: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    if boundary.dtype.is_complex:
        return torch.view_as_complex(part.view(*boundary.shape, 2).to(_real_type(boundary.dtype)))
    return part.view(boundary.shape).to(boundary.dtype)


def _bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a tensor as elements of ``dtype``, padded with zeros."""
    raw = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    rest = -raw.numel() % dtype.itemsize
    return (torch.cat([raw, raw.new_zeros(rest)]) if rest else raw).view(dtype)


def _from_bits(part: torch.Tensor, boundary: Boundary) -> torch.Tensor:
    """Return the value in new memory: the carrier's may be misaligned for its type, and a module may write into it."""
    raw = part.contiguous().view(torch.uint8)[: prod(boundary.shape) * boundary.dtype.itemsize]
    return raw.clone().view(boundary.dtype).view(boundary.shape)
