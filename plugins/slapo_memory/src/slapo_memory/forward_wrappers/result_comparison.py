"""Whether a recompute finds what the forward found: some numbers of the result, looked at in a module's first backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..forward_state._torch_private import no_modes
from ..forward_state.arguments import Arguments

NUMBERS = 512
"""Of each tensor, at most."""


class Sample:
    """Some numbers of a result's tensors, evenly from each.

    Args:
        result: What a forward returned.
    """

    def __init__(self, result: Any) -> None:
        with torch.no_grad(), no_modes():
            self._parts = [_some(tensor) for tensor in Arguments((result,), {}).tensors if _has_numbers(tensor)]

    def differs(self, other: Sample) -> bool:
        """Whether the other's numbers are not these, by more than an operator whose sums have no order may cause."""
        if [part.shape for part in self._parts] != [part.shape for part in other._parts]:
            return False  # torch compares what the backward needs of it
        with torch.no_grad(), no_modes():
            return not all(map(_alike, self._parts, other._parts))


def _has_numbers(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def _some(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // NUMBERS)].clone()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or torch.equal(one, other):
        return one.dtype == other.dtype
    if not one.is_floating_point():
        return False
    largest = one.nan_to_num(0, 0, 0).abs().max().double().item()
    allowed = max(1e-3, 16 * torch.finfo(one.dtype).eps) * largest
    return torch.allclose(one.double(), other.double(), rtol=0, atol=allowed, equal_nan=True)
