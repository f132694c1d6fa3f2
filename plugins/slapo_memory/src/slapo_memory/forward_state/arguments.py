"""A call's arguments as tensors and the structure around them, so that a recompute starts from what the forward got.

Autograd keeps the tensors and notices when one is written to in the meantime. Everything else, a cache that the call
appends to for one, is copied without its tensors before the call.
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
class _Slot:
    """Where tensor number ``index`` belongs."""

    index: int


class Arguments:
    """Arguments that can be rebuilt any number of times.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Attributes:
        tensors: The tensors in them, each once, until they are given away.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._structure = _copied((args, kwargs), self._take, {})

    def give(self) -> list[torch.Tensor]:
        """The tensors, which are not held here any longer: autograd keeps them, or what is offloaded of them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, in new containers and objects, around ``tensors``."""
        args, kwargs = _copied(self._structure, lambda slot: tensors[slot.index], {})
        return args, kwargs

    def _take(self, tensor: torch.Tensor) -> _Slot:
        self.tensors.append(tensor)
        return _Slot(len(self.tensors) - 1)


def _copied(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A copy of containers and plain objects with ``leaf`` applied to what stands for tensors; the rest is shared."""
    if type(value) in ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (torch.Tensor, _Slot)):
        memo[id(value)] = leaf(value)
        return memo[id(value)]
    if isinstance(value, tuple):
        items = [_copied(item, leaf, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (dict, list)) or _is_plain_object(value):
        return _copied_object(value, leaf, memo)
    return value


def _is_plain_object(value: Any) -> bool:
    """An object whose state is its ``__dict__``."""
    cls: Any = type(value)
    special = cls.__reduce__ is not object.__reduce__ or cls.__new__ is not object.__new__
    return hasattr(value, "__dict__") and not special and not callable(value) and not isinstance(value, _BY_REFERENCE)


def _copied_object(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    new: Any = copy.copy(value) if isinstance(value, (dict, list)) else object.__new__(type(value))
    memo[id(value)] = new
    if isinstance(value, dict):
        for key, item in value.items():
            dict.__setitem__(new, key, _copied(item, leaf, memo))
    elif isinstance(value, list):
        list.__setitem__(new, slice(None), [_copied(item, leaf, memo) for item in value])
    for name, item in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _copied(item, leaf, memo)
    return new
