"""Comparison of two functions by their results and gradients on the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_CLOSE = {torch.float32: (2e-5, 2e-6), torch.float64: (1e-9, 1e-9)}
"""Relative and absolute tolerance: exact and approximated GELU differ by 5e-4, two formulas of the same by 1e-6."""
_HALVES_CLOSE = 1e-2
"""Tolerance of half precision on the norm of the difference: single elements are far off where a formula cancels."""
_MAX_ROUNDED_SHARE = 1 / 16
"""Share of elements that may differ by one unit in the last place; with intermediate roundings, a third would."""


@contextmanager
def probe_context() -> Iterator[None]:
    """Enable gradients, disable autocast and inference mode, and restore torch's CPU random state at the end."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def equal(one: Any, other: Any) -> bool:
    """Return whether two tensors are bitwise equal; NaN equals NaN."""
    return _comparable(one, other) and bool(((one == other) | (one.isnan() & other.isnan())).all())


def equal_but_last_bit(one: Any, other: Any) -> bool:
    """Return whether two tensors are equal but for a few last bits: same precision, rounded at the same operations."""
    if not _comparable(one, other):
        return False
    if one.dtype is torch.float64:
        return close(one, other)
    near = torch.allclose(one, other, rtol=torch.finfo(one.dtype).eps, atol=torch.finfo(one.dtype).tiny, equal_nan=True)
    return near and bool((one != other).sum() <= _MAX_ROUNDED_SHARE * one.numel())


def close(one: Any, other: Any) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if not _comparable(one, other):
        return False
    if one.dtype in _CLOSE:
        rtol, atol = _CLOSE[one.dtype]
        return torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
    finite, a, b = one.isfinite(), one.double(), other.double()
    same = equal(a[~finite], b[~finite]) and bool(other[finite].isfinite().all())
    return same and bool(torch.dist(a[finite], b[finite]) <= _HALVES_CLOSE * a[finite].norm())


def same_gradients(
    one: Callable[..., Any], other: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()
) -> bool:
    """Return whether two functions have the same gradients with respect to these inputs and weights."""
    found, factors = [], None
    for function in (one, other):
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        try:
            out = function(*leaves)
            if factors is None:
                factors = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
            found.append(torch.autograd.grad((out * factors).sum(), [*leaves, *weights]))
        except Exception:  # for example a result that requires no gradient
            return False
    tolerance = 1e-4 if inputs[0].dtype in (torch.float32, torch.float64) else 2e-2
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True) for a, b in zip(*found, strict=True))


def _comparable(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype
