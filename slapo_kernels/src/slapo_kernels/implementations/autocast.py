"""Casts that autocast applies to a matrix multiplication, for kernels that autocast does not know."""

from __future__ import annotations

import torch


def is_autocast(tensor: torch.Tensor) -> bool:
    """Return whether autocast is enabled for the tensor's device."""
    return torch.is_autocast_enabled(tensor.device.type)


def cast_for_matmul(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the tensors in the dtype of autocast if it is enabled, else unchanged."""
    if not is_autocast(first):
        return first, second, third
    dtype = torch.get_autocast_dtype(first.device.type)
    return first.to(dtype), second.to(dtype), None if third is None else third.to(dtype)
