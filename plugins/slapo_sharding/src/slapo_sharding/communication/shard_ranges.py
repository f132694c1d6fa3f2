"""Ranges that each rank holds of a dimension: of uneven sizes, and of key and value heads that ranks replicate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import gcd

Ranges = tuple[tuple[int, int], ...]
"""``(start, stop)`` ranges that one rank holds, in order."""


def shard_range(size: int, num_shards: int, rank: int) -> tuple[int, int]:
    """Return the ``(start, stop)`` range of a rank, as ``torch.chunk`` and DTensor split a dimension.

    All ranks but the last ones have ranges of the same size, so a gather of padded shards has its padding at the end.
    """
    part = -(-size // num_shards)
    return min(rank * part, size), min((rank + 1) * part, size)


def block_ranges(size: int, num_shards: int) -> tuple[Ranges, ...]:
    """Return the range of each rank in one block."""
    return tuple((shard_range(size, num_shards, rank),) for rank in range(num_shards))


def key_head_ranges(queries: int, keys: int, size: int, num_shards: int) -> tuple[Ranges, ...]:
    """Return the ranges of each rank in a block of key or value heads: the heads that its query heads use.

    A rank holds a head several times if needed, so that each copy serves the same number of query heads: models pair them so.

    Args:
        queries: Query heads, a multiple of ``keys`` and of ``num_shards``.
        keys: Key heads, as many as value heads.
        size: Size of one head.
        num_shards: Number of ranks.
    """
    own_queries, served = queries // num_shards, queries // keys
    firsts = [range(rank * own_queries, (rank + 1) * own_queries, gcd(own_queries, served)) for rank in range(num_shards)]
    return tuple(_merge_adjacent((query // served * size, (query // served + 1) * size) for query in each) for each in firsts)


def concatenated_ranges(blocks: Sequence[int], ranges: Iterable[tuple[Ranges, ...]]) -> tuple[Ranges, ...]:
    """Return the ranges of each rank in concatenated blocks, from its ranges in each block."""
    starts = [stop - size for stop, size in zip(accumulate(blocks), blocks, strict=True)]
    moved = [
        [tuple((start + low, start + high) for low, high in own) for own in ranks]
        for start, ranks in zip(starts, ranges, strict=True)
    ]
    return tuple(tuple(part for own in parts for part in own) for parts in zip(*moved, strict=True))


def _merge_adjacent(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return tuple(joined)
