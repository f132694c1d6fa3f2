"""Structures of tensors, as models take and return them: what they are made of, and copies of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

Leaves = list[tuple[str, Any]]
"""Parts of a structure by their path in it."""


def copy_leaves(value: Any, path: str, copies: Leaves) -> Any:
    """The inputs again, with tensors that are leaves of a graph of their own; they are listed in ``copies``."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        copies.append((path, copy))
        return copy
    if type(value) is dict:
        return {key: copy_leaves(item, f"{path}[{key!r}]", copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_leaves(item, f"{path}[{index}]", copies) for index, item in enumerate(value))
    return _copied_object(value, path, copies)


def _copied_object(value: Any, path: str, copies: Leaves) -> Any:
    """Another kind of container, or an object with tensors in it, a cache say; what cannot be copied is given as it is."""
    inside = {id(leaf): (step, leaf) for step, leaf in leaves_of(value, path) if isinstance(leaf, torch.Tensor)}
    if isinstance(value, (nn.Module, type)) or callable(value) or not (inside or list(_items(value))):
        return value
    known: dict[int, Any] = {each: copy_leaves(leaf, step, copies) for each, (step, leaf) in inside.items()}
    try:
        return deepcopy(value, known)
    except Exception:  # a lock or a generator in it, say
        return value


@dataclass(frozen=True)
class OpaqueObject:
    """Stands for an object that nobody can look into, a generator say: its type is compared, and no more.

    Args:
        kind: Its type.
    """

    kind: type


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def leaves_of(
    value: Any, path: str, seen: frozenset[int] = frozenset(), met: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an output. A container is a leaf as well, by its type, so that structures are compared too.

    Containers are yielded at each place, objects only once.
    """
    met = set() if met is None else met
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
        yield f"{path}.layout", str(value.layout)
        parts = [(f"[{index}]", part) for index, part in enumerate(value.unbind())] if value.is_nested else [("", dense(value))]
        yield from ((path + step, part) for step, part in parts)
        return
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield path, value
        return
    if (array := _numpy_to_tensor(value)) is not None:
        yield path, array
        return
    if id(value) in seen or (id(value) in met and not isinstance(value, _CONTAINERS)):
        return
    met.add(id(value))
    yield path, type(value) if _is_open(value) else OpaqueObject(type(value))
    for step, item in _items(value):
        yield from leaves_of(item, path + step, seen | {id(value)}, met)


_CONTAINERS = (Mapping, list, tuple, deque)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(sorted(value, key=repr)))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{entry.name}", getattr(value, entry.name)) for entry in fields(value))
    elif not isinstance(value, (type, nn.Module)):
        yield from ((f".{name}", item) for name, item in _attributes(value).items() if not callable(item))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    slots = [name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(name for name in found if not name.startswith("__"))


def _is_open(value: Any) -> bool:
    is_container = isinstance(value, (*_CONTAINERS, set, frozenset, type, nn.Module)) or is_dataclass(value) or callable(value)
    return is_container or hasattr(value, "__dict__") or any(_slots(each) for each in type(value).__mro__)


def _numpy_to_tensor(value: Any) -> torch.Tensor | None:
    """An array of numbers as a tensor."""
    loaded: Any = sys.modules.get("numpy")
    if loaded is None or not isinstance(value, (loaded.ndarray, loaded.generic)) or value.dtype.kind not in "biufc":
        return None
    return torch.from_numpy(loaded.array(value))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers as a strided tensor; the gradient of an embedding may be sparse."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
