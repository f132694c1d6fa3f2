"""Seconds of one step: pipeline, reductions and optimizer."""

from __future__ import annotations

import pytest

from slapo_plan.simulation import StepCosts, simulate_step
from slapo_training import one_forward_one_backward

ONE = {(0, "F"): 1.0, (0, "B"): 2.0}


def test_a_step_without_a_pipeline_is_the_sum_of_its_parts() -> None:
    costs = StepCosts(ONE, reductions={0: 0.5}, optimizer={0: 0.25}, fixed=0.125)
    step = simulate_step(one_forward_one_backward(1, 4), costs)
    assert step.seconds == 4 * 3 + 0.5 + 0.25 + 0.125
    assert (step.bubble, step.computing, step.communicating) == (0, 12.25, 0.625)


@pytest.mark.parametrize(("buckets", "expected"), [(1, 3.5), (2, 3.25), (5, 3.1)])
def test_an_overlapped_reduction_leaves_its_last_bucket(buckets: int, expected: float) -> None:
    costs = StepCosts(ONE, reductions={0: 0.5}, overlapped_reductions=True, buckets={0: buckets})
    assert simulate_step(one_forward_one_backward(1, 1), costs).seconds == pytest.approx(expected)


def test_a_slow_overlapped_reduction_is_waited_for() -> None:
    costs = StepCosts(ONE, reductions={0: 10.0}, overlapped_reductions=True, buckets={0: 4})
    assert simulate_step(one_forward_one_backward(1, 1), costs).seconds == pytest.approx(1 + 0.5 + 10)


def test_optimizers_start_together_behind_the_norm() -> None:
    actions = {(stage, kind): seconds for stage in range(2) for kind, seconds in (("F", 1.0), ("B", 2.0))}
    order = one_forward_one_backward(2, 2)  # rank 1 ends at 7, rank 0 at 9
    costs = StepCosts(actions, optimizer={0: 1.0, 1: 5.0})
    assert simulate_step(order, costs).seconds == 9 + 5


def test_the_parts_of_a_step_add_up() -> None:
    actions = {(stage, kind): seconds for stage in range(4) for kind, seconds in (("F", 1.0), ("B", 2.0))}
    messages = {(stage, stage + step): 0.1 for stage in range(4) for step in (-1, 1)}
    step = simulate_step(
        one_forward_one_backward(4, 8), StepCosts(actions, messages, "blocking", {0: 0.5}, optimizer={0: 1}, fixed=1)
    )
    assert step.computing + step.waiting + step.communicating == pytest.approx(step.seconds)
    assert step.ideal_bubble < step.bubble


def test_collectives_within_actions_are_communication() -> None:
    step = simulate_step(one_forward_one_backward(1, 2), StepCosts(ONE, optimizer={0: 1.0}, collectives={0: 0.75}))
    assert (step.seconds, step.computing, step.communicating) == (7, 6.25, 0.75)
