"""Peak of what the ranks of a pipeline keep between actions."""

from __future__ import annotations

from slapo_plan.simulation import held_peaks
from slapo_torch.pipelining.schedules import action_order
from slapo_training import PipelineAction, one_forward_one_backward


def test_1f1b_keeps_as_many_micro_batches_as_stages_follow() -> None:
    peaks = held_peaks(one_forward_one_backward(4, 8), dict.fromkeys(range(4), 10))
    assert [peaks[rank].nbytes for rank in range(4)] == [40, 30, 20, 10]
    assert peaks[0].in_flight == {0: 4}


def test_gpipe_keeps_all_micro_batches() -> None:
    assert held_peaks(action_order("gpipe", 2, 2, 6), {0: 10, 1: 10})[1].nbytes == 60


def test_working_memory_counts_beside_what_is_kept() -> None:
    peak = held_peaks(one_forward_one_backward(2, 4), {0: 10, 1: 10}, {(0, "B"): 7, (0, "F"): 12})[0]
    # the second forward: 10 kept, 12 needed; the first backward: 20 kept, 7 needed
    assert (peak.nbytes, peak.working, peak.in_flight) == (27, 7, {0: 2})


def test_the_backward_for_inputs_frees_a_part() -> None:
    order = {
        0: [PipelineAction(kind, 0, number) for kind, number in [("F", 0), ("I", 0), ("F", 1), ("I", 1), ("W", 0), ("W", 1)]]
    }
    assert held_peaks(order, {0: 10})[0].nbytes == 20
    freed = held_peaks(order, {0: 10}, freed_by_input_backward={0: 6})[0]
    assert (freed.nbytes, dict(freed.half_done)) == (14, {0: 1})


def test_nothing_is_left_after_a_step() -> None:
    order = {0: [*action_order("zbv", 4, 2, 6)[0], PipelineAction("F", 0, 6)]}
    assert held_peaks({0: order[0]}, {0: 10, 3: 3}, {(0, "F"): 1000})[0].nbytes >= 1000
    last = held_peaks({0: action_order("zbv", 4, 2, 6)[0]}, {0: 0, 3: 0})[0]
    assert last.nbytes == 0
