"""A call's arguments, split into tensors and the structure around them, for the recomputation.

Autograd saves the tensors and detects in-place changes. The rest, such as a cache that the call appends to, is copied without
its tensors before the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .value_kinds import ATOMS

_BY_REFERENCE = (nn.Module, type, ModuleType, Enum)


@dataclass(frozen=True)
class _TensorSlot:
    """Position of tensor number ``index`` in the structure."""

    index: int


class Arguments:
    """Arguments that can be rebuilt any number of times.

    Attributes:
        tensors: The tensors in them, each once, until ``take_tensors``.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._structure = _copy_containers((args, kwargs), self._take, {})

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors and drop them here: autograd saves them, or their offloaded copies, from now on."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these tensors, in new containers and objects."""
        args, kwargs = _copy_containers(self._structure, lambda slot: tensors[slot.index], {})
        return args, kwargs

    def _take(self, tensor: torch.Tensor) -> _TensorSlot:
        self.tensors.append(tensor)
        return _TensorSlot(len(self.tensors) - 1)


def _copy_containers(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Copy containers and plain objects, with ``leaf`` applied to tensors and slots; other values are shared."""
    if type(value) in ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (torch.Tensor, _TensorSlot)):
        memo[id(value)] = leaf(value)
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [_copy_containers(item, leaf, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (dict, list)) or _is_plain_object(value):
        return _copied_object(value, leaf, memo)
    return value


def _is_plain_object(value: Any) -> bool:
    """Return whether the object's state is its ``__dict__``."""
    cls: Any = type(value)
    special = cls.__reduce__ is not object.__reduce__ or cls.__new__ is not object.__new__
    return hasattr(value, "__dict__") and not special and not callable(value) and not isinstance(value, _BY_REFERENCE)


def _copied_object(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    new: Any = copy.copy(value) if isinstance(value, (dict, list)) else object.__new__(type(value))
    memo[id(value)] = new
    if isinstance(value, dict):
        for key, item in value.items():
            dict.__setitem__(new, key, _copy_containers(item, leaf, memo))
    elif isinstance(value, list):
        list.__setitem__(new, slice(None), [_copy_containers(item, leaf, memo) for item in value])
    for name, item in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _copy_containers(item, leaf, memo)
    return new
