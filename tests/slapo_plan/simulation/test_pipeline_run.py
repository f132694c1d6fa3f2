"""Times of the actions and messages of a pipeline."""

from __future__ import annotations

import time

import pytest

from slapo_plan.simulation import run_pipeline
from slapo_torch.pipelining.schedules import action_order
from slapo_torch.timeline import bubble, chrome_trace
from slapo_training import PipelineAction, one_forward_one_backward

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "looped_bfs": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
KINDS = {"F": 1.0, "B": 2.0, "I": 1.2, "W": 0.8}


def _uneven(stages: int) -> dict[tuple[int, str], float]:
    return {(stage, kind): seconds * (1 + stage % 3 / 10) for stage in range(stages) for kind, seconds in KINDS.items()}


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES.items())
def test_the_bubble_is_that_of_the_recorded_timeline(schedule: str, per_rank: int) -> None:
    run = run_pipeline(action_order(schedule, 4 * per_rank, 4, 8), _uneven(4 * per_rank))
    found = bubble(run.timeline())
    assert run.bubble == pytest.approx(found.ideal, abs=1e-12)
    assert run.bubble == pytest.approx(found.measured, abs=1e-12)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES.items())
def test_messages_leave_the_ideal_bubble_as_it_is(schedule: str, per_rank: int) -> None:
    order, seconds = action_order(schedule, 4 * per_rank, 4, 8), _uneven(4 * per_rank)
    messages = {(stage, stage + step): 0.1 for stage in range(4 * per_rank) for step in (-1, 1)}
    run = run_pipeline(order, seconds, messages)
    assert bubble(run.timeline()).ideal == pytest.approx(run_pipeline(order, seconds).bubble, abs=1e-12)
    assert run.bubble > run_pipeline(order, seconds).bubble


def test_1f1b_of_equal_actions_has_the_bubble_of_its_formula() -> None:
    run = run_pipeline(one_forward_one_backward(4, 8), {(stage, kind): KINDS[kind] for stage in range(4) for kind in "FB"})
    assert run.bubble == pytest.approx(3 / (8 + 3))


MESSAGES = {(0, 1): 0.5, (1, 0): 0.5}
TWO = {(stage, kind): KINDS[kind] for stage in range(2) for kind in "FB"}


def test_an_overlapped_message_hides_behind_later_actions() -> None:
    # rank 0: F0 0-1, F1 1-2; rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5; rank 0: B0 5-7, B1 8-10
    assert run_pipeline(one_forward_one_backward(2, 2), TWO, MESSAGES, "overlapped").seconds == 10.0


def test_a_message_on_demand_begins_as_its_receiver_waits() -> None:
    # rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 5-6, B1 6-8; rank 0: B1 8.5-10.5
    assert run_pipeline(one_forward_one_backward(2, 2), TWO, MESSAGES, "on_demand").seconds == 10.5


def test_a_blocking_sender_waits_for_its_receiver() -> None:
    order = {0: [PipelineAction("F", 0, 0), PipelineAction("F", 0, 1), PipelineAction("F", 0, 2)]}
    order[1] = [PipelineAction("F", 1, 0), PipelineAction("F", 1, 1), PipelineAction("F", 1, 2)]
    seconds = {(0, "F"): 1.0, (1, "F"): 5.0}
    assert run_pipeline(order, seconds, MESSAGES, "on_demand").ends[0][-1] == 3.0
    # the send of F1 is waited for behind F2 and ends as rank 1 has run F0: 1.5 + 5 + 0.5
    blocked = run_pipeline(order, seconds, MESSAGES, "blocking")
    assert blocked.messages["SEND_F", 0, 2] == 7.0


def test_messages_of_a_timeline_have_their_times() -> None:
    timeline = run_pipeline(one_forward_one_backward(2, 2), TWO, MESSAGES, "overlapped").timeline(dp=1, tp=2)
    receive = next(each for each in timeline if each["kind"] == "RECV_F")
    expected = {"rank": 1, "dp": 1, "tp": 2, "stage": 1, "microbatch": 0, "start": 1.0, "end": 1.5}
    assert receive == {**expected, "kind": "RECV_F"}
    counts = [sum(each["kind"] == kind for each in timeline) for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")]
    assert counts == [2, 2, 2, 2]
    assert chrome_trace(timeline)["traceEvents"]


def test_an_order_that_never_ends_is_refused() -> None:
    order = {
        0: [PipelineAction("B", 0, 0), PipelineAction("F", 0, 0)],
        1: [PipelineAction("F", 1, 0), PipelineAction("B", 1, 0)],
    }
    with pytest.raises(ValueError, match="ranks 0, 1 wait for each other for ever"):
        run_pipeline(order, TWO)


def test_a_long_step_of_many_ranks_is_simulated_in_a_moment() -> None:
    order, seconds = action_order("interleaved", 32, 16, 512), _uneven(32)
    begin = time.process_time()
    run_pipeline(order, seconds, {(stage, stage + 1): 0.1 for stage in range(31)})
    assert time.process_time() - begin < 1.0  # 0.1 on an idle machine
