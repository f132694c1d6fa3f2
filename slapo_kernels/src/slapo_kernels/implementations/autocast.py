"""What autocast would make of the arguments of a matrix multiplication, for kernels that it does not know."""

from __future__ import annotations

import torch


def is_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on where a tensor is."""
    return torch.is_autocast_enabled(tensor.device.type)


def as_multiplied(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The tensors in the dtype of autocast, where it is on."""
    if not is_autocast(first):
        return first, second, third
    dtype = torch.get_autocast_dtype(first.device.type)
    return first.to(dtype), second.to(dtype), None if third is None else third.to(dtype)
