"""Conversion of stage outputs to the tensors that DeepSpeed sends: tensors whose gradients come back, and integers.

DeepSpeed expects a gradient for every floating-point tensor that it sends, and does not send booleans. Floating-point
tensors without a gradient are therefore sent as the integers of their bits, and booleans as bytes. The stages' plan
records the original types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slapo_core import Boundary, BuildError

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _FillGradients(torch.autograd.Function):
    """Autograd node that gives every received tensor a gradient if one of them gets one: DeepSpeed sends all of them back."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def pack(values: Sequence[torch.Tensor], planned: Sequence[Boundary], stage: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors that DeepSpeed sends for the outputs of a stage, whose index is for errors.

    Raises:
        BuildError: a value has another shape than planned, or its need for a gradient differs from the plan.
    """
    training = torch.is_grad_enabled()
    packed = []
    for value, boundary in zip(values, planned, strict=True):
        wanted = boundary.requires_grad and training
        if tuple(value.shape) != boundary.shape or (value.requires_grad and training) != wanted:
            raise BuildError(
                f"stage {stage} gives {boundary.name!r} with (shape, requires_grad) "
                f"{(tuple(value.shape), value.requires_grad)}, but {(boundary.shape, boundary.requires_grad)} was planned"
            )
        if wanted:
            packed.append((torch.view_as_real(value) if value.is_complex() else value).contiguous())
        else:
            packed.append(_as_bits(value.detach()))
    return tuple(packed)


def unpack(received: Sequence[torch.Tensor], planned: Sequence[Boundary], low: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the values that ``pack`` converted by the same plan.

    ``low`` is the type of two-byte floating-point values whose planned type has another size.
    """
    training = torch.is_grad_enabled()
    carriers = [index for index, boundary in enumerate(planned) if boundary.requires_grad and training]
    own = dict(zip(carriers, _FillGradients.apply(*(received[index] for index in carriers)), strict=True)) if carriers else {}  # type: ignore[no-untyped-call]
    return tuple(
        _as_planned(own[index], boundary.dtype) if index in own else _from_bits(tensor, boundary.dtype, low)
        for index, (tensor, boundary) in enumerate(zip(received, planned, strict=True))
    )


def _as_planned(tensor: torch.Tensor, planned: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(tensor) if planned.is_complex else tensor


def _as_bits(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = _BITS[value.element_size()] if value.is_floating_point() or value.dtype is torch.bool else value.dtype
    return value.contiguous().view(bits)


def _from_bits(tensor: torch.Tensor, planned: torch.dtype, low: torch.dtype) -> torch.Tensor:
    if planned.is_complex:
        return torch.view_as_complex(tensor.view(torch.float64 if tensor.dtype is torch.int64 else torch.float32))
    if not planned.is_floating_point:
        return tensor.view(planned)
    same = planned.itemsize == tensor.element_size()
    return tensor.view(planned if same else {8: torch.float64, 4: torch.float32, 2: low}[tensor.element_size()])
