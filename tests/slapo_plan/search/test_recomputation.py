"""Checkpoint policies against every combination of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slapo_plan.search.recomputation import BlockOptions, Policies, greedy_policies, least_policies

NAMES = ("none", "matmuls", "full")


@st.composite
def stages(draw: st.DrawFn) -> list[BlockOptions]:
    """Up to three kinds of blocks, six together, whose policies free more for more seconds."""
    found, begin = [], 0
    for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        times = sorted(draw(st.lists(st.integers(0, 40), min_size=2, max_size=2)))
        kept = sorted(draw(st.lists(st.integers(0, 100), min_size=3, max_size=3)), reverse=True)
        blocks = tuple(range(begin, begin + size))
        found.append(BlockOptions(blocks, NAMES, (1.0, *(1 + each / 10 for each in times)), tuple(kept)))
        begin += size
    return found


def seconds(options: Sequence[BlockOptions], policies: Policies) -> float:
    return sum(each.seconds[NAMES.index(policies[block])] for each in options for block in each.blocks)


def kept(options: Sequence[BlockOptions], policies: Policies) -> int:
    return sum(each.kept[NAMES.index(policies[block])] for each in options for block in each.blocks)


@settings(max_examples=60, deadline=None)
@given(stages(), st.integers(0, 600), st.integers(0, 30))
def test_no_other_policies_fit_and_recompute_less(options: list[BlockOptions], limit: int, transient: int) -> None:
    def peak(policies: Policies) -> int:
        recomputes = any(each != "none" for each in policies.values())
        return kept(options, policies) + transient * recomputes

    blocks = [block for each in options for block in each.blocks]
    every = [dict(zip(blocks, names, strict=True)) for names in product(NAMES, repeat=len(blocks))]
    fitting = [each for each in every if peak(each) <= limit]
    greedy = greedy_policies(options, peak, limit)
    assume(fitting and greedy[1] <= limit)
    policies, reached = least_policies(options, peak, limit, greedy)
    assert reached == peak(policies) <= limit
    assert seconds(options, policies) <= min(seconds(options, each) for each in fitting) + 1e-9


def test_the_greedy_order_may_be_one_change_too_long() -> None:
    options = [BlockOptions((0,), NAMES[:2], (0.0, 1.0), (10, 0)), BlockOptions((1,), NAMES[:2], (0.0, 3.0), (20, 0))]
    peak = lambda policies: kept(options, policies)  # noqa: E731
    greedy = greedy_policies(options, peak, 10)
    assert seconds(options, greedy[0]) == 4
    assert least_policies(options, peak, 10, greedy) == ({0: "none", 1: "matmuls"}, 10)
