"""Compare what two functions make of the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_CLOSE = {torch.float32: (2e-5, 2e-6), torch.float64: (1e-9, 1e-9)}
"""Relative and absolute: exact and approximated GELU differ by 5e-4, two formulas of one by 1e-6."""
_HALVES_CLOSE = 1e-2
"""Of halves, the distance by the size of all: a formula that is rounded at every step is far off where it cancels."""
_SELDOM = 1 / 16
"""What part of all numbers may be rounded to a neighbour; where steps in between are rounded, a third is another."""


@contextmanager
def quietly() -> Iterator[None]:
    """With gradients, without autocast, and leaving torch's random numbers as they are."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def equal(one: Any, other: Any) -> bool:
    """To the bit."""
    return _comparable(one, other) and bool(((one == other) | (one.isnan() & other.isnan())).all())


def rounded_alike(one: Any, other: Any) -> bool:
    """To the bit, but for a few that are neighbours: both are computed in the same precision and rounded at the same places."""
    if not _comparable(one, other):
        return False
    if one.dtype is torch.float64:
        return close(one, other)
    near = torch.allclose(one, other, rtol=torch.finfo(one.dtype).eps, atol=torch.finfo(one.dtype).tiny, equal_nan=True)
    return near and bool((one != other).sum() <= _SELDOM * one.numel())


def close(one: Any, other: Any) -> bool:
    """But for rounding."""
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
    """Whether both functions have the same gradients at these inputs, and at the weights they use."""
    found, factors = [], None
    for function in (one, other):
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        try:
            out = function(*leaves)
            if factors is None:
                factors = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
            found.append(torch.autograd.grad((out * factors).sum(), [*leaves, *weights]))
        except Exception:  # nothing that gradients flow through, say
            return False
    tolerance = 1e-4 if inputs[0].dtype in (torch.float32, torch.float64) else 2e-2
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True) for a, b in zip(*found, strict=True))


def _comparable(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype
