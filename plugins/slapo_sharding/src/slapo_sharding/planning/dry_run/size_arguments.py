"""Arguments of an operation that have to be divided for it to do the same to a shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, islice
from typing import Any

from torch.fx.node import map_aggregate

_MAX_CHOICES = 2_000
"""Choices that are tried."""


def leaves(value: Any) -> list[Any]:
    """Return what is in tuples, lists, dicts and slices, in their order."""
    found: list[Any] = []
    map_aggregate(value, found.append)
    return found


def with_leaves(value: Any, new: Mapping[int, Any]) -> Any:
    """Return the same tuples, lists, dicts and slices with other leaves at some places."""
    place = iter(range(len(leaves(value))))

    def leaf(old: Any) -> Any:
        number = next(place)
        return new.get(number, old)

    return map_aggregate(value, leaf)


def is_size(value: Any) -> bool:
    """Return whether a value is an integer, be it one that knows where it comes from: a library may keep these in caches."""
    return isinstance(value, int) and not isinstance(value, bool)


def local_size(size: int, ranks: int, held: int = 0) -> int:
    """Return a size, or a place, of a whole value as one of the ranks counts it.

    Args:
        size: In the whole value; below 0 it counts from the end.
        ranks: Number of ranks.
        held: What of it every rank has whole.
    """
    return -local_size(-size, ranks, held) if size < 0 else (size - held) // ranks + held


def leaf_indices_of(given: Any, sizes: Collection[int]) -> tuple[int, ...]:
    """Return the places of integers that are one of some sizes, among the leaves."""
    return tuple(place for place, value in enumerate(leaves(given)) if is_size(value) and value in sizes)


def leaf_indices_to_divide(
    given: Any, whole: Collection[int], ranks: int, fits: Callable[[Any], bool]
) -> tuple[int, ...] | None:
    """Return the places of the sizes that have to be divided, among the leaves; None where no choice fits.

    The shapes decide, which say enough for operations that cut or arrange a tensor by the sizes of their result, and not for
    those that take ranges out of it.

    Args:
        given: Arguments of a call, as one structure; its tensors are shards.
        whole: Sizes that are divided between the ranks.
        ranks: Number of ranks.
        fits: Whether the call gives the right shapes with such arguments.
    """
    values = leaves(given)
    places = [place for place in leaf_indices_of(given, whole) if values[place] % ranks == 0]
    for chosen in islice(_choices(places, values), _MAX_CHOICES):
        if fits(with_leaves(given, {place: values[place] // ranks for place in chosen})):
            return chosen
    return None


def _choices(places: list[int], values: list[Any]) -> Iterator[tuple[int, ...]]:
    """Give none, all of one size, and then every choice, small ones first."""
    yield ()
    yield from (tuple(place for place in places if values[place] == size) for size in sorted({values[at] for at in places}))
    for number in range(1, len(places) + 1):
        yield from combinations(places, number)
