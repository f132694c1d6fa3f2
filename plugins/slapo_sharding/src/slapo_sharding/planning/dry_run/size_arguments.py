"""Size arguments of an operation that must be divided when its input is a shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, islice
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from .layout_records import LayoutRecords

_MAX_CHOICES = 2_000
"""Limit on the subsets of arguments that ``leaf_indices_to_divide`` tries."""


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists, dicts and slices, in order."""
    found: list[Any] = []
    map_aggregate(value, found.append)
    return found


def with_leaves(value: Any, new: Mapping[int, Any]) -> Any:
    """Return the same nested structure with the leaves at some indices replaced."""
    indices = iter(range(len(leaves(value))))

    def leaf(old: Any) -> Any:
        return new.get(next(indices), old)

    return map_aggregate(value, leaf)


def is_size(value: Any) -> bool:
    """Return whether a value is an integer and not a bool; ``SizeWithOrigin`` counts, as libraries may cache such sizes."""
    return isinstance(value, int) and not isinstance(value, bool)


def local_size(size: int, ranks: int, replicated: int = 0) -> int:
    """Return the local value of a size or an index of a whole dimension.

    Args:
        size: Size or index in the whole dimension. A negative number counts from the end.
        ranks: Number of ranks.
        replicated: Elements below ``size`` that every rank holds whole.
    """
    return -local_size(-size, ranks, replicated) if size < 0 else (size - replicated) // ranks + replicated


def leaf_indices_to_divide(
    given: Any, whole: Collection[int], ranks: int, fits: Callable[[Any], bool]
) -> tuple[int, ...] | None:
    """Return the indices of the leaves to divide, or None if no choice gives the right shapes.

    The shapes decide. They determine the answer for operations that view or split a tensor by the sizes of the result. They do
    not for operations that take ranges out of a tensor.

    Args:
        given: Arguments of a call as one structure. The tensors in it are shards.
        whole: Sizes that are divided among the ranks.
        ranks: Number of ranks.
        fits: Returns whether the call gives the right shapes with such arguments.
    """
    values = leaves(given)
    indices = [index for index, value in enumerate(values) if is_size(value) and value in whole and value % ranks == 0]
    for chosen in islice(_choices(indices, values), _MAX_CHOICES):
        if fits(with_leaves(given, {index: values[index] // ranks for index in chosen})):
            return chosen
    return None


def _choices(indices: list[int], values: list[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the empty choice, then all leaves of one size, then every subset by increasing length."""
    yield ()
    yield from (tuple(index for index in indices if values[index] == size) for size in sorted({values[at] for at in indices}))
    for number in range(1, len(indices) + 1):
        yield from combinations(indices, number)


def record_sizes_to_divide(layouts: LayoutRecords, n: fx.Node, value: DTensor, args: Any, kwargs: Any) -> None:
    """Record the size arguments of an operation that would give another shape on one rank."""
    if n in layouts.sizes_to_divide or n in layouts.norms or not any(map(is_size, pytree.tree_leaves((args, kwargs)))):
        return
    local = pytree.tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
    expected = value.to_local().shape
    if _returns_shapes(layouts, n, local, expected):
        return
    given = {int(part) for part in pytree.tree_leaves((args, kwargs)) if is_size(part)}
    pairs = zip(value.shape, expected, strict=True)
    layouts.sizes_to_divide[n] = tuple(whole for whole, part in pairs if whole != part and whole in given)
    record_divided_arguments(layouts, n, local, expected)


def record_divided_arguments(layouts: LayoutRecords, n: fx.Node, given: Any, expected: Any) -> None:
    """Record the indices of the arguments to divide so that an operation returns the expected local shapes."""
    fits = lambda other: _returns_shapes(layouts, n, other, expected)  # noqa: E731
    found = leaf_indices_to_divide(given, layouts.sizes_to_divide[n], layouts.mesh.size(), fits)
    if found is not None:
        layouts.divided_arguments[n] = dict.fromkeys(found, 0)


def _returns_shapes(layouts: LayoutRecords, n: fx.Node, given: Any, expected: Any) -> bool:
    """Return whether a node returns tensors of the expected shapes with other arguments."""
    try:
        value = getattr(layouts, n.op)(n.target, *given)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    shapes = [part.shape for part in value] if isinstance(value, list | tuple) else value.shape
    return bool(shapes == expected)
