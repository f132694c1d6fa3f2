"""Comparison of a recomputation with its forward, by samples of their results, in a module's first backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..forward_state._torch_private import no_modes
from ..forward_state.arguments import Arguments

SAMPLE_SIZE = 512
"""Elements sampled from each tensor; fewer than twice as many."""


class ResultSample:
    """Evenly spaced elements of each tensor in a result.

    Args:
        result: Result of a forward.
    """

    def __init__(self, result: Any) -> None:
        with torch.no_grad(), no_modes():
            self._parts = [_subsample(tensor) for tensor in Arguments((result,), {}).tensors if _has_numbers(tensor)]

    def differs(self, other: ResultSample) -> bool:
        """Return whether the other sample differs by more than nondeterministic sums can cause."""
        if [part.shape for part in self._parts] != [part.shape for part in other._parts]:
            return False  # torch itself checks the metadata of recomputed tensors
        with torch.no_grad(), no_modes():
            return not all(map(_is_close, self._parts, other._parts))


def _has_numbers(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def _subsample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE_SIZE)].clone()


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or torch.equal(one, other):
        return one.dtype == other.dtype
    if not one.is_floating_point():
        return False
    largest = one.nan_to_num(0, 0, 0).abs().max().double().item()
    allowed = max(1e-3, 16 * torch.finfo(one.dtype).eps) * largest
    return torch.allclose(one.double(), other.double(), rtol=0, atol=allowed, equal_nan=True)
