"""Who holds what where ranks do not hold equal parts: sizes that do not divide, and key and value heads in copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import gcd

Ranges = tuple[tuple[int, int], ...]
"""``(start, stop)`` ranges that one rank holds, in order."""


def shard_range(size: int, num_shards: int, rank: int) -> tuple[int, int]:
    """The ``(start, stop)`` range of a rank, as ``torch.chunk`` and DTensor deal it.

    The first ranks all have the same, so only the end of a whole put together of parts of one size is padding.
    """
    part = -(-size // num_shards)
    return min(rank * part, size), min((rank + 1) * part, size)


def block_ranges(size: int, num_shards: int) -> tuple[Ranges, ...]:
    """What each rank holds of one block."""
    return tuple((shard_range(size, num_shards, rank),) for rank in range(num_shards))


def key_head_ranges(queries: int, keys: int, size: int, num_shards: int) -> tuple[Ranges, ...]:
    """What each rank holds of a block of key or value heads: those that its equal share of the query heads needs.

    Each is held as often as it takes to let every one serve as many query heads as the next, which is how models pair them.

    Args:
        queries: Query heads, a multiple of ``keys`` and of ``num_shards``.
        keys: Key heads, as many as value heads.
        size: Of one head.
        num_shards: Number of ranks.
    """
    own, served = queries // num_shards, queries // keys
    firsts = [range(rank * own, (rank + 1) * own, gcd(own, served)) for rank in range(num_shards)]
    return tuple(_merged((query // served * size, (query // served + 1) * size) for query in each) for each in firsts)


def concatenated_ranges(blocks: Sequence[int], dealt: Iterable[tuple[Ranges, ...]]) -> tuple[Ranges, ...]:
    """What each rank holds of all blocks, from what it holds of each."""
    starts = [stop - size for stop, size in zip(accumulate(blocks), blocks, strict=True)]
    moved = [
        [tuple((start + low, start + high) for low, high in own) for own in ranks]
        for start, ranks in zip(starts, dealt, strict=True)
    ]
    return tuple(tuple(part for own in parts for part in own) for parts in zip(*moved, strict=True))


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return tuple(joined)
