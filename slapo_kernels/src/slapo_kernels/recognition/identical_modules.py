"""Structural keys of modules: modules with equal keys compute the same function, and are analysed once."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset((*vars(nn.Module()), "forward"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


def structural_key(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules of one class with equal attributes, shapes and children.

    An attribute that cannot be compared by value is compared by identity.
    """
    settings = tuple(
        (name, _value(value, module))
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith("_slapo")
    )
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in tensors)
    parts = tuple((name, child and structural_key(child)) for name, child in module._modules.items())
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
