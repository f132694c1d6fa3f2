"""Tensors in nested mappings, sequences and dataclasses, as models and loss functions return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

Path = str
"""Path of a tensor in a structure: keys, fields and positions joined by dots; empty for a bare tensor."""


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a mapping, sequence or dataclass by key, position or name; None for other values."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(enumerate(value)) if isinstance(value, (tuple, list)) else None


def tensors_of(value: Any, path: Path = "") -> dict[Path, torch.Tensor]:
    """Return the tensors of a structure by path, in order."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    prefix = f"{path}." if path else ""
    found: dict[Path, torch.Tensor] = {}
    for key, part in (fields_of(value) or {}).items():
        found.update(tensors_of(part, f"{prefix}{key}"))
    return found


def with_tensors(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = "") -> Any:
    """Return the structure with each tensor replaced by ``change(path, tensor)``; other values stay."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    parts = fields_of(value)
    if parts is None:
        return value
    prefix = f"{path}." if path else ""
    return _rebuild(value, {key: with_tensors(part, change, f"{prefix}{key}") for key, part in parts.items()})


def _rebuild(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a structure of the same kind with other parts."""
    if isinstance(value, list):
        return [*parts.values()]
    if isinstance(value, tuple):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else tuple(parts.values())
    made = copy.copy(value)
    for key, part in parts.items():
        if isinstance(made, Mapping):
            made[key] = part  # type: ignore[index]
        else:
            object.__setattr__(made, key, part)
    return made
