"""Deterministic runs of a model: dropout is off, and other random functions return fixed values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MAX_SAMPLES = 100_000
_DROPOUT_P = 4
"""Position of the argument ``dropout_p`` of ``scaled_dot_product_attention``."""

_DROPOUTS = {
    getattr(F, name)
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    )
} | {
    getattr(torch, name)
    for name in (
        "dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_",
        "feature_alpha_dropout", "feature_alpha_dropout_",
    )
}  # fmt: skip
_LIKE = {torch.rand_like: 0.5, torch.randn_like: 0.0}
_NEW: dict[Any, float] = {torch.rand: 0.5, torch.randn: 0.0}
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    torch.Tensor.uniform_: lambda low=0.0, high=1.0, **_: (low + high) / 2,
    torch.Tensor.normal_: lambda mean=0.0, std=1.0, **_: mean,
    torch.Tensor.exponential_: lambda lambd=1.0, **_: 1 / lambd,
    torch.Tensor.bernoulli_: lambda p=0.5, **_: 1.0,
}
_WITH_DROPOUT = {each: inspect.signature(each) for each in (F.multi_head_attention_forward,)}


class UnboundedSamplingError(RuntimeError):
    """A forward samples without end, e.g. until a number is small enough."""


class DeterministicRandom(TorchFunctionMode):
    """Mode in which dropout returns its input, and random functions return the centre of their distribution.

    So the values of a row do not depend on other rows. ``randperm`` returns the reversed order, which mixes rows as any
    permutation would.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_samples = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > _DROPOUT_P:
                args = (*args[:_DROPOUT_P], 0.0, *args[_DROPOUT_P + 1 :])
            return func(*args, **{**given, "dropout_p": 0.0} if "dropout_p" in given else given)
        if func in _WITH_DROPOUT:
            call = _WITH_DROPOUT[func].bind(*args, **given)
            call.arguments["dropout_p"] = 0.0
            return func(*call.args, **call.kwargs)
        found = _fixed_result(func, args, given)
        if found is None:
            return func(*args, **given)
        self._num_samples += 1
        if self._num_samples > _MAX_SAMPLES:
            raise UnboundedSamplingError("the forward draws random numbers without end")
        return found


def _fixed_result(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> torch.Tensor | None:
    """Return the fixed result of a random function, or None for other functions."""
    given.pop("generator", None)
    if func in _LIKE:
        return torch.empty_like(*args, **given).fill_(_LIKE[func])
    if func in _NEW:
        return torch.zeros(*args, **given).fill_(_NEW[func])
    if func is torch.bernoulli:
        return torch.ones_like(args[0] if args else given["input"])
    if func is F.gumbel_softmax:
        return _gumbel_softmax(*args, **given)
    if func is torch.normal and isinstance(args[0] if args else given.get("mean"), torch.Tensor):
        mean: torch.Tensor = args[0] if args else given["mean"]
        return mean.clone()
    if func is torch.randint:
        *bounds, size = args if "size" not in given else (*args, given.pop("size"))
        low = bounds[0] if len(bounds) > 1 else given.pop("low", 0)
        given.pop("high", None)
        return torch.full(size, low, **{"dtype": torch.int64, **given})
    if func is torch.randperm:
        return torch.arange(*args, **given).flip(0)
    if func in _IN_PLACE:
        tensor, *rest = args
        value = _IN_PLACE[func](*rest, **given)
        filled: torch.Tensor = tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)
        return filled
    return None


def _gumbel_softmax(
    logits: torch.Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Return the Gumbel softmax without noise."""
    return (logits / tau).softmax(dim)
