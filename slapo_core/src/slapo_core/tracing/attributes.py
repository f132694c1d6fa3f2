"""What a forward read from its modules: numbers that are part of the graph and may be others at the next call."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..errors import TraceError
from .structures import Snapshot, difference, fingerprint

OF_TORCH = frozenset([*vars(nn.Module()), *dir(nn.Module)]) - {"training"}
"""Names of what torch gives every module."""
_NONE = inspect.Parameter.empty
"""Stands for an attribute that is not there."""


class Attributes:
    """Attributes, of a traced module and of those inside that its graph has taken in, as they were when the forward read them.

    Numbers, strings, functions and whatever is inside containers and objects, configs for one, are compared. Not so what lies
    in numpy arrays, closures, globals or classes, and modules that the traced one does not hold.

    Args:
        root: The module that was traced.
        names: Path and name of each attribute. One that a module gets only later, over its class's, counts as well.
        filled: Those of them that the forward itself sets, as a cache, and what to: that is allowed too.
    """

    def __init__(self, root: nn.Module, names: Collection[tuple[str, str]], filled: Mapping[tuple[str, str], Any]) -> None:
        self._keys: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        for path, name in sorted(names):
            self._keys.setdefault(tuple(path.split(".")) if path else (), []).append((path, name))
        self._filled = filled
        self._original: weakref.ref[nn.Module] | None = weakref.ref(root)
        self._take(self._read(root))
        self._note()

    def check(self, module: nn.Module) -> None:
        """Compare with ``module``, which may be a part of the root, and with the root as far as it is still in use.

        Raises:
            TraceError: An attribute is another one now.
        """
        if changed := self.changed(module):
            raise TraceError(f"attribute {changed}, which is part of the graph; trace again")
        self.check_original(module)

    def check_original(self, module: nn.Module) -> None:
        """Refuse where the module that was traced got another value since, which ``module`` in its place does not have.

        Raises:
            TraceError: An attribute is another one now.
        """
        original = self._original() if self._original is not None else None
        if original is None or original.__dict__ is module.__dict__ or self._is_same(original, in_any_mode=True):
            return
        there = {
            key: part for key, part in self._read(original).items() if key[1] != "training" and part is not self._values[key]
        }
        here = self._read(module) if there else {}
        differs = {key: part for key, part in there.items() if facts_of(part) != facts_of(here.get(key, _NONE))}
        if changed := self._difference(differs, every=True):
            raise TraceError(f"attribute {changed} on the module that was traced; set it on the traced one")

    def changed(self, root: nn.Module) -> str | None:
        """The first attribute that is another one now, in words."""
        every = bool(self._inside.changed())
        if not every and self._is_same(root):
            return None
        values = self._read(root)
        found = self._difference(values, every)
        if found is None:
            self._take({**self._values, **values})
        return found

    def _difference(self, values: dict[tuple[str, str], Any], every: bool) -> str | None:
        for key, value in values.items():
            if value is self._values[key] and not every:
                continue
            now, then = facts_of(value), self._traced[key]
            if now not in (then, self._filled.get(key)) and value is not _NONE:
                return difference(then, now, ".".join(filter(None, key)))
        return None

    @property
    def names(self) -> list[tuple[str, str]]:
        """Path and name of each attribute."""
        return [key for keys in self._keys.values() for key in keys]

    def _read(self, root: nn.Module) -> dict[tuple[str, str], Any]:
        return {
            key: module.__dict__.get(key[1], _NONE)
            for path, keys in self._keys.items()
            if (module := _inside(root, path)) is not None
            for key in keys
        }

    def _is_same(self, root: nn.Module, in_any_mode: bool = False) -> bool:
        """Whether all are the very objects that they were; this is asked at every call."""
        for path, keys in self._keys.items():
            module = _inside(root, path) if path else root
            for key in keys if module is not None else ():
                same = module.__dict__.get(key[1], _NONE) is self._values[key]
                if not same and not (in_any_mode and key[1] == "training"):
                    return False
        return True

    def _take(self, values: dict[tuple[str, str], Any]) -> None:
        self._values, self._inside = values, Snapshot(values)

    def _note(self) -> None:
        self._traced = {key: facts_of(value) for key, value in self._values.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_original": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self._values)
        self._note()  # a copy has tensors of its own


def _inside(root: nn.Module, path: tuple[str, ...]) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


def facts_of(value: Any) -> Any:
    """What has to stay the same of an attribute."""
    return fingerprint(value, lambda tensor: (tuple(tensor.shape), tensor.dtype, id(tensor)))
