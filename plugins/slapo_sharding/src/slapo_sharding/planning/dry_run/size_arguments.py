"""Size arguments of an operation that must be divided when its input is a shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, islice
from typing import Any

from torch.fx.node import map_aggregate

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


def leaf_indices_of(given: Any, sizes: Collection[int]) -> tuple[int, ...]:
    """Return the indices of the leaves that are integers equal to one of ``sizes``."""
    return tuple(index for index, value in enumerate(leaves(given)) if is_size(value) and value in sizes)


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
    indices = [index for index in leaf_indices_of(given, whole) if values[index] % ranks == 0]
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
