"""Which modules compute the same with their weights, so that one of them is looked at for all."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset((*vars(nn.Module()), "forward"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


def kind_of(module: nn.Module) -> Hashable:
    """Equal for modules of one class with equal settings, shapes and parts; what cannot be compared is equal to itself only."""
    settings = tuple(
        (name, _value(value, module))
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith("_slapo")
    )
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in tensors)
    parts = tuple((name, child and kind_of(child)) for name, child in module._modules.items())
    return type(module), settings, shapes, parts


def _value(value: Any, owner: nn.Module) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, float) else value
    if type(value) in (list, tuple):
        return type(value), tuple(_value(item, owner) for item in value)
    if isinstance(value, functools.partial):
        given = tuple((name, _value(item, owner)) for name, item in value.keywords.items())
        return "partial", _value(value.func, owner), _value(value.args, owner), given
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return "method", value.__func__
    return "object", id(value)
