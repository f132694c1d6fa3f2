"""Cuts are placed as well as the best of all placements tried one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_pipeline.balance import Amounts, Placement, best_placement, placements


def _all(cost, crossing: list[int], stages: int) -> list[Placement]:
    """Every placement, by trying."""
    size = len(crossing) + 1
    found = []
    for cuts in itertools.combinations(range(1, size), stages - 1):
        ends = [0, *cuts, size]
        costs = [cost(stage, *pair) for stage, pair in enumerate(itertools.pairwise(ends))]
        found.append(Placement(max(costs), sum(crossing[cut - 1] for cut in cuts), sum(c * c for c in costs), cuts))
    return sorted(found)


@st.composite
def rows(draw: st.DrawFn):
    """Amounts of a row of units, some of them shared, kept once per micro-batch in flight or once."""
    size = draw(st.integers(1, 8))
    uses = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 4), st.integers(0, 9)), max_size=24))
    things = {thing: amount for _, thing, amount in uses}
    own = [(unit, ("own", unit), draw(st.integers(0, 9))) for unit in range(size)]
    shared = [(unit, thing, things[thing]) for unit, thing, _ in uses]
    once, kept = (sorted(part, key=lambda use: use[0]) for part in (own, shared))
    crossing = draw(st.lists(st.integers(0, 3), min_size=size - 1, max_size=size - 1))
    return once, kept, crossing, draw(st.integers(1, size))


@settings(max_examples=300, deadline=None)
@given(rows())
def test_the_best_of_all(row) -> None:
    once, kept, crossing, stages = row
    fixed, flying = Amounts(len(crossing) + 1, once), Amounts(len(crossing) + 1, kept)

    def cost(stage: int, begin: int, end: int) -> int:
        return fixed.of(begin, end) + (stages - stage) * flying.of(begin, end)

    every = _all(cost, crossing, stages)
    best = best_placement(cost, crossing, stages)
    assert best is not None
    assert best[:3] == every[0][:3]
    assert best in every
    some = list(itertools.islice(placements(cost, crossing, stages), 12))
    assert [found[:3] for found in some] == [found[:3] for found in every[:12]]
    assert len({found.cuts for found in some}) == len(some)


@settings(max_examples=200, deadline=None)
@given(rows(), st.data())
def test_amounts_count_a_thing_once(row, data: st.DataObject) -> None:
    _, kept, crossing, _ = row
    size = len(crossing) + 1
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin, size))
    assert Amounts(size, kept).of(begin, end) == sum({thing: a for unit, thing, a in kept if begin <= unit < end}.values())


def _plain(costs: list[int]):
    return lambda stage, begin, end: sum(costs[begin:end])


def test_fewer_bytes_decide_between_equal_costs() -> None:
    best = best_placement(_plain([4, 0, 0, 4]), [3, 1, 2], 2)
    assert best is not None
    assert best.cuts == (2,)


def test_evenness_decides_between_equal_costs_and_bytes() -> None:
    best = best_placement(_plain([9, 1, 1, 1, 1]), [1, 1, 1, 1], 3)
    assert best is not None
    assert best.cuts == (1, 3)


def test_some_cuts_cannot_be_used() -> None:
    best = best_placement(_plain([1, 1, 1, 1]), [1, 1, 1], 2, without=[2])
    assert best is not None
    assert best.cuts in [(1,), (3,)]


@pytest.mark.parametrize(("stages", "without"), [(4, [1]), (5, [])])
def test_too_few_places(stages: int, without: list[int]) -> None:
    assert best_placement(_plain([1, 1, 1, 1]), [1, 1, 1], stages, without) is None


def test_a_thousand_layers() -> None:
    costs = [50, *[10] * 1000, 50]
    best = best_placement(_plain_sums(costs), [1] * 1001, 64)
    assert best is not None
    assert best.largest == 160


def _plain_sums(costs: list[int]):
    sums = [0, *itertools.accumulate(costs)]
    return lambda stage, begin, end: sums[end] - sums[begin]
