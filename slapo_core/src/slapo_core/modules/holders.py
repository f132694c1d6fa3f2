"""Index of holders: every place in the module tree where a module, a parameter or a buffer is registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
"""Names of the dicts of a module's hooks, which have a key for each hook."""


Place = tuple[nn.Module, str]


class Holders:
    """Index from a module or tensor to its places. It has several places if it is shared or tied.

    Built on first use in linear time. ``Schedule``'s own edits keep it up to date. Another edit that gives an indexed value a
    further place in the tree, as ``tie_weights`` does, clears it.

    Attributes:
        is_reusable: False while a primitive edits the tree directly.
    """

    def __init__(self) -> None:
        # module, name, module, name, ... in one flat tuple: the garbage collector has fewer objects to scan
        self._places_by_id: dict[int, tuple[Any, ...]] = {}
        self.is_reusable = True
        _all[id(self)] = self

    def invalidate(self) -> None:
        """Clear the index; the next look-up walks the tree again."""
        self._places_by_id.clear()

    def places_of(self, root: nn.Module, value: nn.Module | torch.Tensor, known: Place | None = None) -> list[Place]:
        """Return the places under ``root`` that hold this very object; none for the root itself and for objects outside the
        tree.

        Args:
            root: Top of the tree.
            value: A module, parameter or buffer.
            known: One of its places; an index that lacks it is rebuilt.
        """
        found = self._known_places(value)
        stale = not self._places_by_id or not self.is_reusable or (known and known not in found)
        if stale or not all(any(value is held for own, held in _members(holder) if own == name) for holder, name in found):
            self.invalidate()
            self._places_by_id[id(root)] = ()
            self._index_tree(root)
            found = self._known_places(value)
        return found

    def substitute(self, places: list[Place], old: Any, new: Any) -> None:
        """Put ``new`` at the places of ``old``, as ``places_of`` returned them. Both are modules, or both tensors."""
        for holder, name in places:
            next(table for table in (holder._parameters, holder._buffers, holder._modules) if name in table)[name] = new
        fresh = id(new) not in self._places_by_id and isinstance(new, nn.Module)
        self._add(new, places)
        if fresh:
            self._index_tree(new)
        self._remove(old, places)

    def _known_places(self, value: Any) -> list[Place]:
        flat = iter(self._places_by_id.get(id(value), ()))
        return list(zip(flat, flat, strict=True))

    def _add(self, value: Any, places: Iterable[Place]) -> None:
        self._places_by_id[id(value)] = (*self._places_by_id.get(id(value), ()), *chain.from_iterable(places))

    def _index_tree(self, module: nn.Module) -> None:
        strangers = [child for child in module._modules.values() if child is not None and id(child) not in self._places_by_id]
        for name, value in _members(module):
            self._add(value, [(module, name)])
        for child in dict.fromkeys(strangers):
            self._index_tree(child)

    def _remove(self, value: Any, places: list[Place]) -> None:
        left = [place for place in self._known_places(value) if place not in places]
        self._places_by_id.pop(id(value), None)
        if left:  # still held elsewhere
            self._add(value, left)
        elif isinstance(value, nn.Module):
            for name, inner in _members(value):
                self._remove(inner, [(value, name)])


def _members(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for table in (module._parameters, module._buffers, module._modules):
        for name, value in table.items():
            if value is not None:
                yield name, value


_all: WeakValueDictionary[int, Holders] = WeakValueDictionary()


def _clear_if_tied(module: nn.Module, name: str, value: nn.Module | torch.Tensor | None) -> None:
    for index in filter(None, (reference() for reference in _all.valuerefs())):
        if id(module) in index._places_by_id and id(value) in index._places_by_id:
            index.invalidate()


nn.modules.module.register_module_parameter_registration_hook(_clear_if_tied)
nn.modules.module.register_module_buffer_registration_hook(_clear_if_tied)
nn.modules.module.register_module_module_registration_hook(_clear_if_tied)
