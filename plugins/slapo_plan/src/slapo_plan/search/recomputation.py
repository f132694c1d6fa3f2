"""Checkpoint policies of the blocks of a rank: the least recomputation with which its memory suffices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

_ROUNDS = 6
"""Number of programs that are solved for one rank at most."""


@dataclass(frozen=True)
class BlockOptions:
    """Equal blocks of one stage, and the policies that each may have.

    Args:
        blocks: Their indices, in order.
        policies: Names of the policies; the first recomputes nothing.
        seconds: Seconds of a block under each policy.
        kept: Most bytes that a rank keeps for a block under each policy, over all micro-batches in flight.
    """

    blocks: tuple[int, ...]
    policies: tuple[str, ...]
    seconds: tuple[float, ...]
    kept: tuple[int, ...]


Policies = dict[int, str]
"""Policy of each block."""


def greedy_policies(options: Sequence[BlockOptions], peak: Callable[[Policies], int], limit: int) -> tuple[Policies, int]:
    """Return the policy of each block and the peak; with the most recomputation if nothing fits.

    One block's policy changes after the other, those first that free the most bytes for a second of recomputation, until the
    peak is within the limit. The policies of a block are those on the upper hull of its freed bytes over seconds, so that this
    is at most one change from the least recomputation.

    Args:
        options: Blocks and their policies.
        peak: Returns the most bytes of the rank under some policies.
        limit: Bytes of the device.
    """
    policies = {block: each.policies[0] for each in options for block in each.blocks}
    if (found := peak(policies)) <= limit:
        return policies, found
    changes = _changes(options)
    low, high = 0, len(changes)
    while low < high:
        middle = (low + high) // 2
        if peak({**policies, **dict(changes[:middle])}) <= limit:
            high = middle
        else:
            low = middle + 1
    policies |= dict(changes[:low])
    return policies, peak(policies)


def _changes(options: Sequence[BlockOptions]) -> list[tuple[int, str]]:
    found = []
    for each in options:
        hull = _upper_hull([*zip(each.policies, each.seconds, each.kept, strict=True)])
        found += [(-rate, place, block, name) for place, block in enumerate(each.blocks) for name, rate in hull]
    return [(block, name) for _, _, block, name in sorted(found)]


def _upper_hull(options: Sequence[tuple[str, float, int]]) -> list[tuple[str, float]]:
    """Return the policies worth taking, each with the bytes that it frees beyond the one before for each further second.

    Args:
        options: Name, seconds and kept bytes of each policy, from the one that recomputes least.
    """
    _, seconds, kept = options[0]
    found: list[tuple[str, float]] = []
    rest = [*options[1:]]
    while rest:
        rated = [(_rate(kept - each[2], each[1] - seconds), each) for each in rest if each[2] < kept]
        if not rated:
            break
        rate, best = max(rated, key=lambda item: item[0])
        found.append((best[0], rate))
        _, seconds, kept = best
        rest = rest[rest.index(best) + 1 :]
    return found


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else inf


def least_policies(
    options: Sequence[BlockOptions], peak: Callable[[Policies], int], limit: int, found: tuple[Policies, int]
) -> tuple[Policies, int]:
    """Return the policies with the least seconds of recomputation, by integer programs; those that are given if none is better.

    What a program knows of the memory are the bytes that policies free, of which none of the peak's transients is part. While
    the peak of its result is beyond the limit, the next program has to free as much more.

    Args:
        options: Blocks and their policies.
        peak: Returns the most bytes of the rank under some policies.
        limit: Bytes of the device.
        found: Result of ``greedy_policies``.
    """
    whole = peak({block: each.policies[0] for each in options for block in each.blocks})
    needed = whole - limit
    if needed <= 0 or found[1] > limit:
        return found
    most = _seconds(options, found[0])
    for _ in range(_ROUNDS):
        counts = _solve(options, needed)
        if counts is None:
            return found
        policies = _in_order(options, counts)
        if _seconds(options, policies) >= most:
            return found
        if (reached := peak(policies)) <= limit:
            return policies, reached
        needed += reached - limit
    return found


def _seconds(options: Sequence[BlockOptions], policies: Mapping[int, str]) -> float:
    tables = ((each, dict(zip(each.policies, each.seconds, strict=True))) for each in options)
    return sum(seconds[policies[block]] for each, seconds in tables for block in each.blocks)


def _solve(options: Sequence[BlockOptions], needed: int) -> list[list[int]] | None:
    """Return the number of blocks under each policy that frees enough for the fewest seconds; None if none does."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415  takes half a second

    seconds = [value - each.seconds[0] for each in options for value in each.seconds]
    freed = [(each.kept[0] - value) / needed for each in options for value in each.kept]
    groups = [[float(own is each) for own in options for _ in own.policies] for each in options]
    sizes = [len(each.blocks) for each in options]
    most = [size for size, each in zip(sizes, options, strict=True) for _ in each.policies]
    scale = max(max(map(abs, seconds)), 1e-12)
    solved = milp(
        [value / scale for value in seconds],
        constraints=[LinearConstraint(groups, sizes, sizes), LinearConstraint([freed], 1.0, inf)],
        integrality=[1] * len(seconds),
        bounds=Bounds(0, most),
    )
    if solved.x is None:
        return None
    numbers = iter(map(round, solved.x))
    return [[next(numbers) for _ in each.policies] for each in options]


def _in_order(options: Sequence[BlockOptions], counts: Sequence[Sequence[int]]) -> Policies:
    """Return the policies of blocks: those that recompute most come first in a stage, where they are kept longest."""
    found: Policies = {}
    for each, numbers in zip(options, counts, strict=True):
        names = [name for name, number in zip(each.policies, numbers, strict=True) for _ in range(number)]
        found |= zip(each.blocks, reversed(names), strict=True)
    return found
