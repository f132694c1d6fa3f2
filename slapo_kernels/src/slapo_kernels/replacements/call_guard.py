"""Guard of a kernel module: the calls for which its kernels compute the same as the original forward."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which kernels are compared with the original forward."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


class Absent:
    """The value of a missing attribute."""


@dataclass(frozen=True)
class CallGuard:
    """Conditions on a call and on the module's attributes under which kernels may replace the forward.

    Args:
        dtypes: Admitted dtypes of the inputs.
        dims: Admitted numbers of dimensions of the inputs.
        attributes: Attributes that the forward reads, as the child that has it, ``""`` for the module, and its name.
        attribute_values: Expected values of these attributes; a call with other values runs the original forward.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    attributes: tuple[tuple[str, str], ...]
    attribute_values: tuple[Any, ...] = ()

    def for_module(self, module: nn.Module) -> CallGuard:
        """Return the guard with the attribute values of this module."""
        values = (_value(_part(module, part), name) for part, name in self.attributes)
        return replace(self, attribute_values=tuple(list(value) if type(value) is list else value for value in values))

    def admits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a call meets the conditions."""
        for arg in args:
            if not isinstance(arg, torch.Tensor) or arg.dtype not in self.dtypes or arg.dim() not in self.dims:
                return False
        device = args[0].device.type
        is_cast = len(self.dtypes) < len(DTYPES) and torch.is_autocast_enabled(device)
        if is_cast and torch.get_autocast_dtype(device) not in self.dtypes:
            return False
        for (part, name), known in zip(self.attributes, self.attribute_values, strict=True):
            value = _value(_part(module, part), name)
            if value is not known and not _equal_value(value, known):
                return False
        return True


def attributes_are_comparable(module: nn.Module, reads: Iterable[tuple[str, str]]) -> bool:
    """Return whether the guard would notice a change of any of these attributes; it cannot look inside arbitrary objects."""
    return all(_is_plain(_value(_part(module, part), name)) for part, name in reads)


def _part(module: Any, part: str) -> Any:
    return module._modules[part] if part else module


def _value(owner: Any, name: str) -> Any:
    """Return the value of the attribute; for a method bound to the owner, its function."""
    value = getattr(owner, name, Absent)
    return value.__func__ if type(value) is types.MethodType and value.__self__ is owner else value


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_plain, value))
    if isinstance(value, functools.partial):
        return all(map(_is_plain, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, (*_ATOMS, *_FUNCTIONS))


def _equal_value(value: Any, known: Any) -> bool:
    """Return whether two distinct objects are equal for a forward, such as a list and its copy."""
    if type(value) is not type(known):
        return False
    if isinstance(value, _ATOMS):
        return bool(value == known)
    same = isinstance(value, (list, tuple)) and len(value) == len(known)
    return same and all(one is other or _equal_value(one, other) for one, other in zip(value, known, strict=True))
