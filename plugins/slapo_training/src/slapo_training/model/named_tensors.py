"""Parameters and persistent buffers of a model, by first original name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..distributed.full_tensors import original_keys

Tensors = dict[str, torch.Tensor]


def parameters(module: nn.Module) -> Tensors:
    """Return the parameters by first original name, tied ones once."""
    return _by_first_name(module.named_parameters())


def buffers(module: nn.Module) -> Tensors:
    """Return the persistent buffers by first original name, shared ones once."""
    held: dict[int, tuple[str, torch.Tensor]] = {}
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                held.setdefault(id(buffer), (f"{path}.{name}" if path else name, buffer))
    return _by_first_name(held.values())


def make_dense(tensor: torch.Tensor) -> None:
    """Give an expanded tensor memory for all elements, so that it can be written in place."""
    if tensor.layout is torch.strided and any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        tensor.data = tensor.detach().contiguous()


@torch.no_grad()
def copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    make_dense(tensor)
    tensor.copy_(values)


def _by_first_name(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    tensors = dict(named)
    return {keys[0]: tensors[name] for name, keys in original_keys(tensors.items()).items()}


def is_wrapper_subclass(tensor: torch.Tensor | None) -> bool:
    """Return True for a subclass that wraps other tensors, e.g. a quantised weight; False for DTensors."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements")
