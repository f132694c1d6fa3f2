"""Operators of optimizer steps: a step of pointwise operators alone updates each element by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Operators = list[tuple[Any, str]]
"""Operators in order, each with its arguments; those that are tensors are left out."""

_COPIES = {
    *("_local_scalar_dense", "alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like", "lift_fresh", "ones"),
    *("ones_like", "zero_", "zeros", "zeros_like"),
}
"""Further operators that treat all elements alike; a number is read of a tensor with one element only."""


class StepOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records operators.

    Attributes:
        found: Those that ran so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Operators = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        kept = tree_map_only(torch.Tensor, lambda each: each.dim() > 0, (args, kwargs))
        self.found.append((func, repr(kept)))
        return func(*args, **(kwargs or {}))


def is_pointwise(operators: Operators) -> bool:
    """Return True if each operator computes an element of its result from the same element of its arguments.

    Those that are given a shape do so if they are equal in steps of parameters of several shapes.
    """
    return all(torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _COPIES for func, _ in operators)
