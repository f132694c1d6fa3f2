"""Fast results of calls on meta tensors for which torch runs dozens of operations in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

_OF_ONE = frozenset(("gelu", "relu", "square"))
_OF_TWO = frozenset("add radd sub rsub mul rmul div rdiv truediv rtruediv pow".split())
_NORMS = (F.layer_norm, F.rms_norm)


def result_of(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a tensor of the call's shape, dtype and autograd inputs, by functions whose meta kernel is in C++."""
    if args and _is_plain(args[0]):
        if _is_like_silu(func, name, args, kwargs):
            return F.silu(args[0])
        if name in _OF_TWO and len(args) == 2 and not kwargs and _is_plain(args[1]) and args[0].dtype is args[1].dtype:
            return torch.lerp(args[0], args[1], 0.5)
    return func(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point()


def _is_like_silu(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _OF_ONE:
        plain = not kwargs.get("inplace") and kwargs.get("approximate", "none") in ("none", "tanh")
        return len(args) == 1 and plain and kwargs.keys() <= {"inplace", "approximate"}
    if name in _OF_TWO:
        return len(args) == 2 and type(args[1]) in (int, float) and not kwargs
    if func not in _NORMS or len(args) != 2 or not kwargs.keys() <= {"weight", "bias", "eps"}:
        return False
    x, shape = args[0], tuple(args[1])
    return tuple(x.shape[-len(shape) :]) == shape and all(_fits(kwargs.get(each), x, shape) for each in ("weight", "bias"))


def _fits(weight: Any, x: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a weight is None, or a leaf that a norm over ``shape`` takes without a cast."""
    if weight is None:
        return True
    return _is_plain(weight) and weight.grad_fn is None and tuple(weight.shape) == shape and weight.dtype is x.dtype
