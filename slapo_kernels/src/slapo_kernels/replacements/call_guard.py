"""When the kernels of a swapped module are known to compute what its own forward does."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Those that kernels are tried in."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


class Absent:
    """The value of an attribute that is not there."""


@dataclass(frozen=True)
class Conditions:
    """What a call of a module has to be like, and the module itself.

    Args:
        dtypes: Of the inputs, where the kernels compute what the forward does.
        dims: Numbers of dimensions of the inputs that the forward treats alike.
        reads: Attributes that the forward goes by: the part of the module that has it, ``""`` for itself, and its name.
        values: What these are, in their order; a call with others is left to the forward.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    reads: tuple[tuple[str, str], ...]
    values: tuple[Any, ...] = ()

    def of(self, module: nn.Module) -> Conditions:
        """With the values of this module."""
        values = (_value(_part(module, part), name) for part, name in self.reads)
        return replace(self, values=tuple(list(value) if type(value) is list else value for value in values))

    def hold(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Whether a call is such a one."""
        for arg in args:
            if not isinstance(arg, torch.Tensor) or arg.dtype not in self.dtypes or arg.dim() not in self.dims:
                return False
        if len(self.dtypes) < len(DTYPES) and not self._holds_under_autocast(args[0].device.type):
            return False
        for (part, name), known in zip(self.reads, self.values, strict=True):
            value = _value(_part(module, part), name)
            if value is not known and not _is_still(value, known):
                return False
        return True

    def _holds_under_autocast(self, device: str) -> bool:
        return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) in self.dtypes


def can_be_compared(module: nn.Module, reads: Iterable[tuple[str, str]]) -> bool:
    """Whether a change of any of these attributes would be seen: not that of what is inside an object."""
    return all(_is_plain(_value(_part(module, part), name)) for part, name in reads)


def _part(module: Any, part: str) -> Any:
    return module._modules[part] if part else module


def _value(owner: Any, name: str) -> Any:
    """What the owner has, or its class; of a method of its own, the function."""
    value = getattr(owner, name, Absent)
    return value.__func__ if type(value) is types.MethodType and value.__self__ is owner else value


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_plain, value))
    if isinstance(value, functools.partial):
        return all(map(_is_plain, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, (*_ATOMS, *_FUNCTIONS))


def _is_still(value: Any, known: Any) -> bool:
    """Whether a value that is another object is the same for a forward, as what is in a copy of a list is."""
    if type(value) is not type(known):
        return False
    if isinstance(value, _ATOMS):
        return bool(value == known)
    same = isinstance(value, (list, tuple)) and len(value) == len(known)
    return same and all(one is other or _is_still(one, other) for one, other in zip(value, known, strict=True))
