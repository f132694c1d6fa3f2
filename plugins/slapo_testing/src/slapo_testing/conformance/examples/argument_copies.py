"""Arguments of a call that a step may change without anybody else's being changed."""

from __future__ import annotations

from typing import Any

import torch


def own(value: Any, *, clone: bool = False) -> Any:
    """The same in containers of its own.

    Args:
        value: Lists, tuples, dicts and sets are made anew; what is in them is the same object.
        clone: Whether tensors are copied, too.
    """
    if type(value) in (list, tuple, set):
        return type(value)(own(item, clone=clone) for item in value)
    if type(value) is dict:
        return {key: own(item, clone=clone) for key, item in value.items()}
    return value.detach().clone() if clone and isinstance(value, torch.Tensor) else value


def same(now: Any, then: Any) -> bool:
    """Whether something is what ``own`` has kept of it."""
    if now is then:
        return True
    if type(now) in (list, tuple) and type(then) is type(now):
        return len(now) == len(then) and all(map(same, now, then))
    if type(now) is dict and type(then) is dict:
        return [*now] == [*then] and all(map(same, now.values(), then.values()))
    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
        return now.shape == then.shape and now.dtype == then.dtype and bool(torch.equal(now, then))
    return bool(now == then)
