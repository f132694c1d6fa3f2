"""Sizes that record their origin, so that one graph serves every batch size and sequence length."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

SIZE = "size"
"""Key of a node's ``meta`` that holds the value of a size during the trace."""


class Size(int):
    """Integer that the forward read from a shape or an attribute, or computed from such integers.

    Python and torch treat it as a plain integer. Decisions of Python by its value, such as ``if`` or ``range``, are not
    recorded: a graph serves only calls whose own trace gave the same graph, see ``graphs.variants``.

    Attributes:
        form: The function that computes the integer, and its operands: nodes, other sizes, plain integers and strings.
    """

    form: tuple[Any, ...]

    def __new__(cls, value: int, *form: Any) -> Size:
        made = super().__new__(cls, value)
        made.form = form
        return made

    def __deepcopy__(self, memo: Any) -> Size:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _operation(function: Callable[[int, int], int], reflected: bool) -> Callable[[Size, Any], Any]:
    def apply(self: Size, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        operands = (other, self) if reflected else (self, other)
        return Size(function(*map(int, operands)), function, *operands)

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Size, f"__{_name}__", _operation(getattr(operator, _name), False))
    setattr(Size, f"__r{_name}__", _operation(getattr(operator, _name), True))


def size_of(tensor: torch.Tensor, node: fx.Node, answer: Any, dim: Any = None) -> Any:
    """Return the result of ``shape``, ``size`` or ``numel`` with its origin."""
    sizes = [Size(value, "size", node, place) for place, value in enumerate(tensor.shape)]
    if isinstance(answer, tuple):
        return torch.Size(sizes)
    return sizes[dim] if dim is not None else reduce(operator.mul, sizes, 1)
