"""Copies of modules on the meta device, without hooks and wrappers, for analysis."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from slapo_core import HOOK_TABLES
from slapo_tracing.recording import WRAPPER_ATTRIBUTES


def meta_copy(module: nn.Module, dtype: torch.dtype | None, training: bool) -> nn.Module:
    """Return a copy of the same classes and attributes, with meta weights and ``MetaLinear`` for its linear layers.

    Args:
        module: The module; it does not change.
        dtype: Dtype of floating weights; None keeps the dtype of each.
        training: Mode of the copy.
    """
    copied: nn.Module = object.__new__(type(module))
    state = {name: value for name, value in vars(module).items() if name not in WRAPPER_ATTRIBUTES}
    state.update({name: type(state[name])() for name in HOOK_TABLES if name in state})
    vars(copied).update(state)
    for table in ("_parameters", "_buffers"):
        tensors = vars(module)[table].items()
        vars(copied)[table] = {name: None if tensor is None else _empty(tensor, dtype) for name, tensor in tensors}
    vars(copied)["_modules"] = {
        name: child and (MetaLinear.of(child, dtype) if is_linear(child) else meta_copy(child, dtype, training))
        for name, child in module._modules.items()
    }
    vars(copied)["training"] = training
    rebind_methods(module, copied)
    return copied


def rebind_methods(old: nn.Module, new: nn.Module) -> None:
    """Bind methods of ``old`` that ``new`` holds as attributes, as ``self.act = self._gelu`` makes, to ``new``."""
    for name, value in vars(new).items():
        if isinstance(value, types.MethodType) and value.__self__ is old:
            vars(new)[name] = types.MethodType(value.__func__, new)
        elif isinstance(value, functools.partial) and any(each is old for each in value.args):  # a wrapped forward
            args = [new if each is old else each for each in value.args]
            vars(new)[name] = functools.partial(value.func, *args, **value.keywords)


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is an ``nn.Linear`` or subclass, or Transformers' Conv1D, which keeps ``weight[in, out]``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is Transformers' Conv1D, by its name: nothing here imports Transformers."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def is_stateless(module: nn.Module) -> bool:
    """Return whether the module has no parameters, buffers or children, so that a kernel could do its work."""
    return not (module._modules or module._parameters or module._buffers)


class MetaLinear(nn.Module):
    """Stand-in for a linear layer: checks the input and returns an empty tensor of the layer's output shape."""

    def __init__(self, width: int, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.out = width, out
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype, device="meta"))
        self.bias = None

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype | None) -> MetaLinear:
        weight: Any = module.weight
        out, width = weight.shape[::-1] if is_conv1d(module) else weight.shape
        return cls(width, out, dtype or weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.width or x.dtype != self.weight.dtype:
            raise ValueError(f"the layer takes {self.width} numbers of {self.weight.dtype}")
        return x.new_empty(*x.shape[:-1], self.out)


def _empty(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=kind, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
