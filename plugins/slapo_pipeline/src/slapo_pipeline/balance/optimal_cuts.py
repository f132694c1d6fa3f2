"""Where to cut a row of units so that the largest stage costs least.

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
    """How much some units in a row have, where what several of them have counts once.

    Args:
        num_units: Length of the whole row.
        uses: Unit, thing and amount, ascending by unit.
    """

    def __init__(self, num_units: int, uses: Iterable[tuple[int, Hashable, int]]) -> None:
        first = [0] * num_units
        again: list[list[tuple[int, int]]] = [[] for _ in range(num_units)]
        last: dict[Hashable, int] = {}
        for unit, thing, amount in uses:
            if thing not in last:
                first[unit] += amount
            for begin in range(last.get(thing, unit) + 1, unit + 1):  # rows that begin here lack the use before
                again[begin].append((unit, amount))
            last[thing] = unit
        self._first = [0, *accumulate(first)]
        self._again = [([unit for unit, _ in found], [0, *accumulate(amount for _, amount in found)]) for found in again]

    def of(self, begin: int, end: int) -> int:
        """The amount of units ``begin`` to ``end - 1``."""
        units, sums = self._again[begin]
        return self._first[end] - self._first[begin] + sums[bisect_left(units, end)]


class CutChoice(NamedTuple):
    """Where to cut. The least is the best: of equal largest costs the fewest bytes that cross, then the most even costs.

    Args:
        largest: Cost of the dearest stage.
        crossing: Bytes that cross all cuts.
        unevenness: Sum of the squares of the costs, which is least where all are equal.
        cuts: Ascending.
    """

    largest: int
    crossing: int
    unevenness: int
    cuts: tuple[int, ...]


def best_cuts(cost: Cost, crossing: Sequence[int], stages: int, without: Collection[int] = ()) -> CutChoice | None:
    """The best placement of ``stages - 1`` cuts, or None where there are too few places.

    Args:
        cost: Of a stage.
        crossing: Bytes that cross cut 1, cut 2 and so on; there is one unit more.
        stages: How many, at least one.
        without: Cuts not to be used.
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
    for begun in reversed(best[1:]):
        index = begun[index].before
        cuts.append(ends[index])
    return CutChoice(largest, whole.crossing, whole.unevenness, tuple(reversed(cuts[:-1])))


def cuts_by_cost(cost: Cost, crossing: Sequence[int], stages: int, without: Collection[int] = ()) -> Iterator[CutChoice]:
    """All placements, the best first.

    Any other placement lacks one of the best's cuts, so the next one is the best of those without one of them.
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
        placement, _, excluded = heapq.heappop(waiting)
        if placement.cuts not in given:
            given.add(placement.cuts)
            yield placement
        for cut in placement.cuts:
            add(excluded | {cut})


class _Prefix(NamedTuple):
    """The best way to cut the first units: as in ``CutChoice``, and the index of the end of the stage before the last."""

    crossing: int
    unevenness: int
    before: int


def _smallest_maximum(cost: Cost, ends: Sequence[int], stages: int) -> int:
    """The largest cost of the placement where that is least. The cost of what is before an end grows with it."""
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
    begun: dict[int, _Prefix], cost: Callable[[int, int], int], crossing: Sequence[int], ends: Sequence[int], largest: int
) -> dict[int, _Prefix]:
    """The best ways with one more stage, none dearer than ``largest``, by the index of their end."""
    longer: dict[int, _Prefix] = {}
    for end in range(1, len(ends)):
        for begin in range(end - 1, -1, -1):
            if begin not in begun:
                continue
            price = cost(ends[begin], ends[end])
            if price > largest:
                break
            sent = crossing[ends[begin] - 1] if begin else 0
            way = _Prefix(begun[begin].crossing + sent, begun[begin].unevenness + price * price, begin)
            if end not in longer or way[:2] < longer[end][:2]:
                longer[end] = way
    return longer
