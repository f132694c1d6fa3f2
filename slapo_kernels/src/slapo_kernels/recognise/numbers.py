"""Compare what two functions make of the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_CLOSE = {torch.float32: (2e-5, 2e-6), torch.bfloat16: (2e-2, 2e-2)}
"""Relative and absolute: exact and approximated GELU differ by 5e-4, two formulas of one by 1e-6."""


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
    return _comparable(one, other) and torch.equal(one, other)


def close(one: Any, other: Any) -> bool:
    """But for rounding."""
    if not _comparable(one, other) or one.dtype not in _CLOSE:
        return False
    rtol, atol = _CLOSE[one.dtype]
    return torch.allclose(one, other, rtol=rtol, atol=atol)


def same_gradients(
    one: Callable[..., Any], other: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()
) -> bool:
    """Whether both functions have the same gradients at these inputs, and at the weights they use."""
    found = []
    for function in (one, other):
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        try:
            out = function(*leaves)
            factors = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
            found.append(torch.autograd.grad((out * factors).sum(), [*leaves, *weights]))
        except Exception:  # nothing that gradients flow through, say
            return False
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*found, strict=True))


def _comparable(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype
