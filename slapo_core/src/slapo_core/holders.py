"""Who holds what: every place in the module tree where a module, a parameter or a buffer is registered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
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
        self._places: dict[int, list[Place]] | None = None
        self.kept = True

    def drop(self) -> None:
        """Forget; the next look-up walks the tree again."""
        self._places = None

    def of(self, root: nn.Module, value: nn.Module | torch.Tensor, known: Place | None = None) -> list[Place]:
        """The places under ``root`` that hold this very object; empty for the root itself and for strangers.

        Args:
            root: Top of the tree.
            value: A module, parameter or buffer.
            known: One of its places; an index that lacks it is made anew.
        """
        found = self._places.get(id(value), []) if self._places is not None and self.kept else None
        if found is None or (known and known not in found) or not all(_holds(place, value) for place in found):
            self._places = defaultdict(list)
            for module in root.modules():
                self._enter(module)
            found = self._places.get(id(value), [])
        return list(found)

    def put(self, root: nn.Module, old: Any, new: Any) -> None:
        """Put ``new`` at every place of ``old``. Both are modules, or both tensors."""
        places = self.of(root, old)
        for holder, name in places:
            _table(holder, name)[name] = new
        assert self._places is not None
        known = self._places[id(new)]
        fresh = not known and isinstance(new, nn.Module)
        known.extend(places)
        if fresh:
            self._enter_tree(new)
        for place in places:
            self._places[id(old)].remove(place)
        self._leave(old)

    def _enter_tree(self, module: nn.Module) -> None:
        assert self._places is not None
        strangers = [child for child in module._modules.values() if child is not None and not self._places[id(child)]]
        self._enter(module)
        for child in dict.fromkeys(strangers):
            self._enter_tree(child)

    def _leave(self, value: Any) -> None:
        assert self._places is not None
        if self._places[id(value)]:  # held elsewhere still
            return
        del self._places[id(value)]
        if isinstance(value, nn.Module):
            for name, inner in _members(value):
                if (value, name) in self._places[id(inner)]:
                    self._places[id(inner)].remove((value, name))
                self._leave(inner)

    def _enter(self, module: nn.Module) -> None:
        assert self._places is not None
        for name, value in _members(module):
            self._places[id(value)].append((module, name))


def _members(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for table in (module._parameters, module._buffers, module._modules):
        for name, value in table.items():
            if value is not None:
                yield name, value


def _holds(place: Place, value: Any) -> bool:
    holder, name = place
    return any(table.get(name) is value for table in (holder._parameters, holder._buffers, holder._modules))


def _table(holder: nn.Module, name: str) -> dict[str, Any]:
    for table in (holder._parameters, holder._buffers, holder._modules):
        if name in table:
            return table
    raise KeyError(name)
