"""Who holds what: every place in the module tree where a module, a parameter or a buffer is registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

Place = tuple[nn.Module, str]


class Holders:
    """An index from a module or tensor to its places. More than one place: shared, or tied.

    Built on first use in linear time; kept up to date by ``Schedule``'s own edits and dropped after foreign ones.

    Attributes:
        kept: Whether the index may be used again. Not while a primitive edits the tree directly.
    """

    def __init__(self) -> None:
        self._flat: dict[int, tuple[Any, ...]] = {}  # module, name, module, name, ... of each; empty: not known
        self.kept = True

    def drop(self) -> None:
        """Forget; the next look-up walks the tree again."""
        self._flat.clear()

    def of(self, root: nn.Module, value: nn.Module | torch.Tensor, known: Place | None = None) -> list[Place]:
        """The places under ``root`` that hold this very object; empty for the root itself and for strangers.

        Args:
            root: Top of the tree.
            value: A module, parameter or buffer.
            known: One of its places; an index that lacks it is made anew.
        """
        found = self._places(value)
        stale = not self._flat or not self.kept or (known and known not in found)
        if stale or not all(_holds(place, value) for place in found):
            self.drop()
            for module in root.modules():
                self._enter(module)
            found = self._places(value)
        return found

    def put(self, places: list[Place], old: Any, new: Any) -> None:
        """Put ``new`` at the places of ``old``, as ``of`` gave them. Both are modules, or both tensors."""
        for holder, name in places:
            _table(holder, name)[name] = new
        fresh = id(new) not in self._flat and isinstance(new, nn.Module)
        self._add(new, places)
        if fresh:
            self._enter_tree(new)
        self._leave(old, places)

    def _places(self, value: Any) -> list[Place]:
        flat = iter(self._flat.get(id(value), ()))
        return list(zip(flat, flat, strict=True))

    def _add(self, value: Any, places: Iterable[Place]) -> None:
        self._flat[id(value)] = (*self._flat.get(id(value), ()), *chain.from_iterable(places))

    def _enter_tree(self, module: nn.Module) -> None:
        strangers = [child for child in module._modules.values() if child is not None and id(child) not in self._flat]
        self._enter(module)
        for child in dict.fromkeys(strangers):
            self._enter_tree(child)

    def _enter(self, module: nn.Module) -> None:
        for name, value in _members(module):
            self._flat[id(value)] = (*self._flat.get(id(value), ()), module, name)

    def _leave(self, value: Any, places: list[Place]) -> None:
        left = [place for place in self._places(value) if place not in places]
        self._flat.pop(id(value), None)
        if left:  # held elsewhere still
            self._add(value, left)
        elif isinstance(value, nn.Module):
            for name, inner in _members(value):
                self._leave(inner, [(value, name)])


def _members(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for table in (module._parameters, module._buffers, module._modules):
        for name, value in table.items():
            if value is not None:
                yield name, value


def _holds(place: Place, value: Any) -> bool:
    holder, name = place
    return holder._parameters.get(name) is value or holder._buffers.get(name) is value or holder._modules.get(name) is value


def _table(holder: nn.Module, name: str) -> dict[str, Any]:
    return next(table for table in (holder._parameters, holder._buffers, holder._modules) if name in table)
