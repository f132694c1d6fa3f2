"""Optimal cuts of a sequence of units: the largest cost of a stage is least.

The units are ``0`` to ``n - 1``; cut ``c`` lies before unit ``c``, so that a stage runs the units from one cut to the next.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

Cost = Callable[[int, int, int], int]
"""``cost(stage, begin, end)`` of units ``begin`` to ``end - 1``.

It does not fall with more units, nor rise for the same units in a later stage.
"""


class SharedAmounts:
    """Sums over contiguous units in which a shared item, such as a tied parameter, counts once.

    ``uses`` has unit, key of the item and amount, ascending by unit.
    """

    def __init__(self, num_units: int, uses: Iterable[tuple[int, Hashable, int]]) -> None:
        first = [0] * num_units
        again: list[list[tuple[int, int]]] = [[] for _ in range(num_units)]
        last: dict[Hashable, int] = {}
        for unit, key, amount in uses:
            if key not in last:
                first[unit] += amount
            for begin in range(last.get(key, unit) + 1, unit + 1):  # ranges that begin here exclude the use before
                again[begin].append((unit, amount))
            last[key] = unit
        self._first = [0, *accumulate(first)]
        self._again = [([unit for unit, _ in found], [0, *accumulate(amount for _, amount in found)]) for found in again]

    def of(self, begin: int, end: int) -> int:
        """Return the amount of units ``begin`` to ``end - 1``."""
        units, sums = self._again[begin]
        return self._first[end] - self._first[begin] + sums[bisect_left(units, end)]


class CutChoice(NamedTuple):
    """A choice of cuts. The least tuple is the best: least largest cost, then fewest bytes that cross, then most even costs.

    Args:
        largest: Cost of the most expensive stage.
        crossing: Bytes that cross all cuts.
        unevenness: Sum of the squares of the costs, which is least if all are equal.
    """

    largest: int
    crossing: int
    unevenness: int
    cuts: tuple[int, ...]


def best_cuts(cost: Cost, crossing: Sequence[int], stages: int, without: Collection[int] = ()) -> CutChoice | None:
    """Return the best ``stages - 1`` cuts, or None if there are too few places.

    Args:
        crossing: Bytes that cross cut 1, cut 2 and so on, one entry fewer than units.
    """
    size = len(crossing) + 1
    ends = [0, *(cut for cut in range(1, size) if cut not in without), size]
    if stages >= len(ends):
        return None
    largest = _smallest_maximum(cost, ends, stages)
    best: list[dict[int, _Prefix]] = [{0: _Prefix(0, 0, 0)}]
    for stage in range(stages):
        best.append(_add_stage(best[-1], partial(cost, stage), crossing, ends, largest))
    index = len(ends) - 1
    whole = best[-1][index]
    cuts = []
    for prefix in reversed(best[1:]):
        index = prefix[index].before
        cuts.append(ends[index])
    return CutChoice(largest, whole.crossing, whole.unevenness, tuple(reversed(cuts[:-1])))


def cuts_by_cost(cost: Cost, crossing: Sequence[int], stages: int, without: Collection[int] = ()) -> Iterator[CutChoice]:
    """Yield all choices of cuts, best first.

    Every other choice lacks one of the best one's cuts, so the next is the best of the choices that exclude one of these.
    """
    waiting: list[tuple[CutChoice, int, frozenset[int]]] = []
    tried: set[frozenset[int]] = set()
    given: set[tuple[int, ...]] = set()

    def add(excluded: frozenset[int]) -> None:
        found = best_cuts(cost, crossing, stages, excluded) if excluded not in tried else None
        tried.add(excluded)
        if found is not None:
            heapq.heappush(waiting, (found, len(tried), excluded))

    add(frozenset(without))
    while waiting:
        choice, _, excluded = heapq.heappop(waiting)
        if choice.cuts not in given:
            given.add(choice.cuts)
            yield choice
        for cut in choice.cuts:
            add(excluded | {cut})


class _Prefix(NamedTuple):
    """The best cuts of the first units: sums as in ``CutChoice``, and the index of the end of the stage before the last."""

    crossing: int
    unevenness: int
    before: int


def _smallest_maximum(cost: Cost, ends: Sequence[int], stages: int) -> int:
    """Return the least largest cost of a stage. Bisection works as the cost of the units before an end grows with it."""
    count = len(ends) - 1
    least = [0, *(cost(0, 0, end) for end in ends[1:])]
    for stage in range(1, stages):
        before, least = least, [0] * (count + 1)
        for index in range(stage + 1, count + 1):

            def of(begin: int, stage: int = stage, end: int = ends[index]) -> int:
                return cost(stage, ends[begin], end)

            turn = bisect_left(range(stage, index - 1), True, key=lambda begin: before[begin] >= of(begin)) + stage
            least[index] = min(max(before[begin], of(begin)) for begin in (turn, turn - 1) if begin >= stage)
    return least[count]


def _add_stage(
    prefixes: dict[int, _Prefix], cost: Callable[[int, int], int], crossing: Sequence[int], ends: Sequence[int], largest: int
) -> dict[int, _Prefix]:
    """Extend the prefixes by one stage that costs at most ``largest``; the keys are the indices of their ends."""
    longer: dict[int, _Prefix] = {}
    for end in range(1, len(ends)):
        for begin in range(end - 1, -1, -1):
            if begin not in prefixes:
                continue
            price = cost(ends[begin], ends[end])
            if price > largest:
                break
            sent = crossing[ends[begin] - 1] if begin else 0
            way = _Prefix(prefixes[begin].crossing + sent, prefixes[begin].unevenness + price * price, begin)
            if end not in longer or way[:2] < longer[end][:2]:
                longer[end] = way
    return longer
