"""Tensors of a model that checkpoints keep: parameters and persistent buffers, by their first names in the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..distributed.full_tensors import original_keys

Tensors = dict[str, torch.Tensor]


def parameters(module: nn.Module) -> Tensors:
    """Parameters by their first name in the unmodified model, a tied one once."""
    return _by_first_name(module.named_parameters())


def buffers(module: nn.Module) -> Tensors:
    """Persistent buffers by their first name in the unmodified model, a shared one once."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                held.setdefault(id(buffer), (f"{path}.{name}" if path else name, buffer))
    return _by_first_name(held.values())


def make_dense(tensor: torch.Tensor) -> None:
    """Give a tensor that was expanded memory for all of its elements, so that they can be written."""
    if tensor.layout is torch.strided and any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        tensor.data = tensor.detach().contiguous()


@torch.no_grad()
def copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Put values into a tensor."""
    make_dense(tensor)
    tensor.copy_(values)


def _by_first_name(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    tensors = dict(named)
    return {keys[0]: tensors[name] for name, keys in original_keys(tensors.items()).items()}


def is_wrapper_subclass(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is of a subclass that wraps others, as a quantised weight does its scales; DTensors apart."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements")
