"""Python values that contain tensors: comparison of the arguments of two calls, snapshots, and copies."""

from __future__ import annotations

import copy
import copyreg
import enum
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from . import _torch_private as private
from .symbolic_sizes import Size


class Hidden:
    """Base class of bookkeeping objects on a module that are not part of the module's state."""


_PLAIN = (dict, list, tuple, set, frozenset, deque)
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_ATOM_TYPES = frozenset(ATOMS)
_IMMUTABLE = frozenset((tuple, frozenset))
_BY_REFERENCE = (
    *ATOMS,
    *(type, enum.Enum, nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(torch.Generator, range, type(Ellipsis), fx.Graph, fx.Node, Hidden),
    *([dist.ProcessGroup] if dist.is_available() else []),
)


def by_reference(value: Any) -> bool:
    """Return True if a graph may hold this very object, since no forward changes it."""
    return isinstance(value, _BY_REFERENCE) or type(value).__module__ == "numpy"


def contents(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container or object by index, key or attribute; None for a value without parts."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, torch.Tensor) or by_reference(value):
        return None
    parts = _parts(value)
    return None if parts is None else dict(parts)


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a value other than a dict. Attributes are read from the tables, since a config's may be slow."""
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    slots = _slots(value)
    held: dict[Any, Any] = {name: object.__getattribute__(value, name) for name in slots if hasattr(value, name)}
    try:
        table: dict[Any, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return held if slots else None
    return {**table, **held} if slots else table


def _slots(value: Any) -> Iterable[str]:
    """Return the names of the attributes of an object that are not in its ``__dict__``."""
    return ("func", "args", "keywords") if isinstance(value, partial) else copyreg._slotnames(type(value))  # type: ignore[attr-defined]


def fill(value: Any, parts: dict[Any, Any]) -> None:
    """Replace the parts of a mutable container or object, the reverse of ``contents``."""
    if not isinstance(value, (dict, list, set, deque)):
        for name in () if isinstance(value, partial) else _slots(value):
            object.__setattr__(value, name, parts[name]) if name in parts else object.__delattr__(value, name)
        parts = {name: part for name, part in parts.items() if name not in _slots(value)}
        value = getattr(value, "__dict__", {})
    value.clear()
    value.extend(parts.values()) if isinstance(value, (list, deque)) else value.update(parts)


def walk(value: Any, seen: set[int] | None = None) -> Iterator[tuple[tuple[Any, ...], Any, dict[Any, Any] | None]]:
    """Yield path, value and ``contents`` of everything inside ``value`` except plain atoms, starting with itself.

    A path has the attribute names and keys that lead to a value. ``seen`` has the ids of those to skip; visited ones are added.
    """
    seen = set() if seen is None else seen
    todo: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while todo:
        path, value = todo.pop()
        if id(value) not in seen:
            parts = contents(value)
            yield path, value, parts
            if parts is not None:
                seen.add(id(value))
                todo += [((*path, key), part) for key, part in reversed(parts.items()) if type(part) not in _ATOM_TYPES]


class Snapshot:
    """Contents of a value at one moment, down to the innermost object, for comparison and restoration.

    Args:
        value: A container or an object.
        seen: Ids of objects in another snapshot; those of this one are added.
    """

    def __init__(self, value: Any, seen: set[int] | None = None) -> None:
        self.parts = {path: (part, parts) for path, part, parts in walk(value, seen) if parts is not None}

    def changed_paths(self) -> list[tuple[Any, ...]]:
        """Return the paths of the parts that have changed."""
        return [path for path, (part, old) in self.parts.items() if not _has_same_parts(part, old)]

    def restore(self) -> None:
        restore_contents(self.parts.values())


def restore_contents(parts: Iterable[tuple[Any, dict[Any, Any]]]) -> None:
    """Restore the former contents of containers and objects."""
    for part, old in parts:
        if not _has_same_parts(part, old):
            fill(part, old)


def _has_same_parts(part: Any, old: dict[Any, Any]) -> bool:
    if type(part) in _IMMUTABLE:
        return True
    new = part if isinstance(part, dict) else _parts(part) or {}
    return len(new) == len(old) and all(map(operator.is_, new.values(), old.values())) and new.keys() == old.keys()


def getter(value: Any) -> Callable[[Any, Any], Any]:
    """Return the function that reads a part by its key in ``contents``: ``getter(value)(value, key)``."""
    return operator.getitem if isinstance(value, (dict, list, tuple, deque)) else getattr


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside."""
    return (part for _, part, _ in walk(value) if isinstance(part, torch.Tensor))


def has_tensor(value: Any) -> bool:
    """Return True if a tensor is anywhere inside."""
    return isinstance(value, torch.Tensor) or any(True for _ in tensors_in(value))


def is_input(value: Any) -> bool:
    """Return True if a graph must receive the value at every call: a tensor, or an object such as a cache."""
    return any(isinstance(p, torch.Tensor) or not (parts is None or isinstance(p, _PLAIN)) for _, p, parts in walk(value))


def _shape_and_dtype(tensor: torch.Tensor) -> Any:
    has_shape = not tensor.is_nested or tensor.layout is torch.jagged  # the older kind of nested tensors has none
    return tuple(tensor.shape) if has_shape else ("nested", tensor.dim()), tensor.dtype


def fingerprint(
    value: Any, tensor: Callable[[torch.Tensor], Any] = _shape_and_dtype, seen: dict[int, int] | None = None
) -> Any:
    """Return a value that is equal for values that a graph cannot tell apart: tensors by shape and dtype, others by value.

    Args:
        value: Any value.
        tensor: Fingerprint of a tensor, in place of shape and dtype.
        seen: Numbers of the objects visited so far, by id.
    """
    if type(value) in _ATOM_TYPES:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, tensor(value)
    if isinstance(value, ATOMS):
        return (int, int(value)) if type(value) is Size else (type(value), value)
    parts = contents(value)
    if parts is None:
        return type(value), value.tobytes() if hasattr(value, "tobytes") else value
    seen = {} if seen is None else seen
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    return type(value), {key: fingerprint(part, tensor, seen) for key, part in parts.items()}


def _describe(print_: Any) -> str:
    """Return a fingerprint as text for messages."""
    if print_[0] is torch.Tensor:
        return f"a tensor {list(print_[1][0])} {str(print_[1][1]).removeprefix('torch.')}"
    return repr(print_[1]) if print_[0] in ATOMS else f"a {getattr(print_[0], '__name__', 'value seen before')}"


def difference(traced: Any, given: Any, path: str) -> str:
    """Return the first difference of two fingerprints, e.g. ``mask is a tensor [2, 4] int64, traced as None``."""
    nested = traced[0] is given[0] and traced[0] not in (torch.Tensor, *ATOMS) and isinstance(traced[1], dict)
    if nested and isinstance(given[1], dict):
        for key in [*traced[1], *given[1]]:
            if key not in traced[1] or key not in given[1]:
                return f"{path}[{key!r}] is {'new' if key in given[1] else 'missing'}"
            if traced[1][key] != given[1][key]:
                return difference(traced[1][key], given[1][key], f"{path}[{key!r}]")
    return f"{path} is {_describe(given)}, traced as {_describe(traced)}"


def alias_duplicates(value: Any, seen: set[int]) -> Any:
    """Return the arguments with a repeated tensor as two aliases, since another call may pass two tensors."""
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            value = value.view_as(value)
        seen.add(id(value))
        return value
    if type(value) not in (tuple, list, dict):
        return value
    parts = contents(value) or {}
    changed = {key: alias_duplicates(part, seen) for key, part in parts.items()}
    if all(map(operator.is_, changed.values(), parts.values())):
        return value
    return changed if type(value) is dict else type(value)(changed.values())


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same tuples, lists and dicts with every tensor changed; other containers and objects are kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(part, change) for key, part in value.items()}
    return type(value)(map_tensors(part, change) for part in value) if type(value) in (tuple, list) else value


def replace_tensors(value: Any, change: Callable[[torch.Tensor], Any], memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value`` with every tensor changed. Objects in ``memo`` (by id) are taken from there."""
    with private.recorded(), _TensorCopies(change):
        return copy.deepcopy(value, memo)


class _TensorCopies(TorchFunctionMode):
    """Torch function mode that replaces the deep copies of tensors."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.change(args[0])
        with private.unrecorded():
            return func(*args, **(kwargs or {}))


MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes in which a module stores its registered parameters, buffers and submodules."""


def shallow_copy(module: nn.Module, bare: bool = False) -> nn.Module:
    """Return a module with the same attributes, and the same contents in tables of its own; ``bare`` leaves these empty."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for name in MODULE_TABLES:
        copied.__dict__[name] = type(module.__dict__[name])() if bare else module.__dict__[name].copy()
    return copied
