"""Attributes that a forward reads from its modules: values that are part of the graph and may differ in the next call."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core import TraceError

from ..nodes.nested_values import MODULE_TABLES, Snapshot, difference, fingerprint

_TABLES = MODULE_TABLES[:3]
MODULE_ATTRIBUTES = frozenset([*vars(nn.Module()), *dir(nn.Module)]) - {"training", *_TABLES}
"""Names of the attributes and methods that torch gives every module."""
_MISSING = inspect.Parameter.empty
"""Value of an attribute that does not exist."""
_SUBMODULE = "a module"
"""Value of an attribute that is a submodule, which may be another one at every call."""


def value_of(module: Any, name: str) -> Any:
    """Return the value of an attribute: the dtype of a weight, ``_SUBMODULE`` for a submodule."""
    attributes = module.__dict__
    if name in attributes:
        return attributes[name]
    for table in _TABLES:
        if name in attributes[table]:
            value = attributes[table][name]
            return value.dtype if isinstance(value, torch.Tensor) else value and _SUBMODULE
    return _MISSING


def first_weight(module: nn.Module) -> list[tuple[int, str]]:
    """Return the id of the module with the first parameter inside, and the parameter's name there; empty if there is none."""
    todo = [module]
    for child in todo:
        for name, weight in child.__dict__["_parameters"].items():
            if weight is not None:
                return [(id(child), name)]
        todo += filter(None, child.__dict__["_modules"].values())
    return []


class Attributes:
    """Attributes of a traced module and of the inlined modules, as they were when the forward read them.

    Numbers, strings, functions and the contents of containers and objects, such as configs, are compared by value. Parameters
    and buffers are compared by presence and dtype, submodules by presence, lists of submodules by names. Contents of numpy
    arrays, closures, globals, classes and modules outside of the traced one are not compared.

    Args:
        root: The module that was traced.
        names: Path and name of each attribute. An attribute that a module gets only later, and that hides its class's, counts
            as well.
        filled: Those that the forward itself sets, as a cache, with their values, which are accepted too.

    Attributes:
        is_rewritten: True if a rewrite may have added or removed submodules since the last comparison.
    """

    is_rewritten = False

    def __init__(self, root: nn.Module, names: Collection[tuple[str, str]], filled: Mapping[tuple[str, str], Any]) -> None:
        self._keys: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        for path, name in sorted(names):
            self._keys.setdefault(tuple(path.split(".")) if path else (), []).append((path, name))
        self._filled = filled
        self._original: weakref.ref[nn.Module] | None = weakref.ref(root)
        self._store_values(self._read(root))
        self._held = {k for k, v in self._values.items() if k[1] in _TABLES or v is _SUBMODULE or isinstance(v, torch.dtype)}
        self._own = {*self._held, *(key for key in self._values if key[1] == "training")}
        self._store_facts()

    def check(self, module: nn.Module) -> None:
        """Raise ``TraceError`` if an attribute differs on ``module``, a part of the root, or on a root still in use."""
        if changed := self.find_change(module, in_part=True):
            raise TraceError(f"attribute {changed}, which is part of the graph; trace again")
        self.check_original(module)

    def check_original(self, module: nn.Module) -> None:
        """Raise ``TraceError`` for a value set on the original module since, but not on ``module``, which replaces it."""
        original = self._original() if self._original is not None else None
        if original is None or original.__dict__ is module.__dict__ or self._is_same(original, self._own):
            return
        known = self._values
        there = {k: part for k, part in self._read(original).items() if k not in self._own and part is not known[k]}
        here = self._read(module) if there else {}
        differs = {k: part for k, part in there.items() if attribute_facts(part) != attribute_facts(here.get(k, _MISSING))}
        if changed := self._difference(differs, every=True):
            raise TraceError(f"attribute {changed} on the module that was traced; set it on the traced one")

    def find_change(self, root: nn.Module, in_part: bool = False) -> str | None:
        """Return the first attribute that differs, as text, or None; ``in_part`` ignores weights and submodules."""
        every = bool(self._inside.changed_paths())
        if not every and not self.is_rewritten and self._is_same(root, self._held if in_part else ()):
            return None
        values = self._read(root)
        if self.is_rewritten:
            self.is_rewritten = False
            self._traced.update((key, _facts(key, value)) for key, value in values.items() if key[1] in _TABLES)
        values = {key: value for key, value in values.items() if key not in self._held} if in_part else values
        found = self._difference(values, every)
        if found is None:
            self._store_values({**self._values, **values})
        return found

    def _difference(self, values: dict[tuple[str, str], Any], every: bool) -> str | None:
        for key, value in values.items():
            if value is self._values[key] and not every:
                continue
            now, then = _facts(key, value), self._traced[key]
            if now not in (then, self._filled.get(key)) and value is not _MISSING:
                return difference(then, now, ".".join(filter(None, key)))
        return None

    @property
    def names(self) -> list[tuple[str, str]]:
        """Path and name of each attribute."""
        return [key for keys in self._keys.values() for key in keys]

    def _read(self, root: nn.Module) -> dict[tuple[str, str], Any]:
        return {
            key: value_of(module, key[1])
            for path, keys in self._keys.items()
            if (module := submodule_at(root, path)) is not None
            for key in keys
        }

    def _is_same(self, root: nn.Module, skipped: Collection[tuple[str, str]] = ()) -> bool:
        """Return True if all are the same objects as before. Runs at every call."""
        for path, watched in self._watched:
            module = submodule_at(root, path) if path else root
            if module is None:
                continue
            attributes = module.__dict__
            for key, name, value in watched:
                now = attributes[name] if name in attributes else value_of(module, name)
                if now is not value and key not in skipped:
                    return False
        return True

    def _store_values(self, values: dict[tuple[str, str], Any]) -> None:
        self._values, self._inside = values, Snapshot(values)
        self._watched = [(path, [(key, key[1], values.get(key)) for key in keys]) for path, keys in self._keys.items()]

    def _store_facts(self) -> None:
        self._traced = {key: _facts(key, value) for key, value in self._values.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_original": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._store_values(self._values)
        self._store_facts()  # a copy has tensors of its own


def submodule_at(root: nn.Module, path: Iterable[str]) -> nn.Module | None:
    """Return the module at a path, or None."""
    module: nn.Module | None = root
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


def _facts(key: tuple[str, str], value: Any) -> Any:
    return attribute_facts({name: part is not None for name, part in value.items()} if key[1] in _TABLES else value)


def attribute_facts(value: Any) -> Any:
    """Return the fingerprint of an attribute: tensors by shape, dtype and identity."""
    return fingerprint(value, lambda tensor: (tuple(tensor.shape), tensor.dtype, id(tensor)))
