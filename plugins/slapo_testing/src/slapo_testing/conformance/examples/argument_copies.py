"""Copies of a call's arguments, so that a step changes only its own."""

from __future__ import annotations

from typing import Any

import torch


def copy_containers(value: Any, *, clone: bool = False) -> Any:
    """Return the value with new lists, tuples, dicts and sets around the same objects.

    Args:
        value: Any value.
        clone: True to clone tensors, too.
    """
    if type(value) in (list, tuple, set):
        return type(value)(copy_containers(item, clone=clone) for item in value)
    if type(value) is dict:
        return {key: copy_containers(item, clone=clone) for key, item in value.items()}
    return value.detach().clone() if clone and isinstance(value, torch.Tensor) else value


def is_unchanged(now: Any, then: Any) -> bool:
    """Return True if a value equals the copy that ``copy_containers`` made of it."""
    if now is then:
        return True
    if type(now) in (list, tuple) and type(then) is type(now):
        return len(now) == len(then) and all(map(is_unchanged, now, then))
    if type(now) is dict and type(then) is dict:
        return [*now] == [*then] and all(map(is_unchanged, now.values(), then.values()))
    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
        return now.shape == then.shape and now.dtype == then.dtype and bool(torch.equal(now, then))
    return bool(now == then)
