"""Timelines of pipelines: their bubbles, and as traces."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from slapo_core import build
from slapo_plan.simulation import run_pipeline
from slapo_testing import run_distributed
from slapo_torch.pipelining.schedules import action_order
from slapo_torch.timeline import COMPUTES, bubble, chrome_trace

from ..layouts import adamw, gpt2, losses, mesh_of, my_part, scheduled, tokens


def _step(rank: int, kind: str, per_rank: int) -> list[dict[str, Any]]:
    mesh = mesh_of(pp=2)
    data = tokens(1)
    schedule = scheduled(gpt2(), mesh, my_part(data[0], mesh), per_rank)
    config: dict[str, Any] = {"microbatches": 4, "pipeline_schedule": kind, "record_timeline": True}
    engine: Any = build(schedule, "torch", optimizer=adamw, **config)
    losses(engine, mesh, data[:2])
    return list(engine.timeline)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "per_rank", "computes"),
    [
        ("1f1b", 1, {"F": 8, "B": 8}),
        pytest.param("interleaved", 2, {"F": 16, "B": 16}, marks=pytest.mark.slow),
        ("zbv", 2, {"F": 16, "I": 16, "W": 16}),
    ],
)
def test_every_action_and_message_of_a_step_is_there(kind: str, per_rank: int, computes: dict[str, int]) -> None:
    actions = [action for own in run_distributed(_step, 2, kind, per_rank) for action in own]
    counts = {kind: sum(action["kind"] == kind for action in actions) for kind in computes}
    if kind == "zbv":  # some backwards are not split
        whole = sum(action["kind"] == "B" for action in actions)
        counts = {"F": counts["F"], "I": counts["I"] + whole, "W": counts["W"] + whole}
    assert counts == computes
    boundaries = {"1f1b": 1, "interleaved": 3, "zbv": 2}[kind]  # between ranks
    for message in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        assert sum(action["kind"] == message for action in actions) == 4 * boundaries
    assert all(action["start"] <= action["end"] for action in actions)
    found = bubble(actions)
    assert 0 <= found.ideal <= found.measured < 1
    computed = {rank: [each for each in actions if each["rank"] == rank and each["kind"] in COMPUTES] for rank in range(2)}
    run = {rank: [(each["kind"], each["stage"], each["microbatch"]) for each in row] for rank, row in computed.items()}
    assert run == action_order(kind, 2 * per_rank, 2, 4)
    means = {(stage, name): _mean_seconds(actions, stage, name) for name in "FBIW" for stage in range(2 * per_rank)}
    assert run_pipeline(action_order(kind, 2 * per_rank, 2, 4), means).bubble == pytest.approx(found.ideal, abs=1e-9)


def _mean_seconds(actions: list[dict[str, Any]], stage: int, kind: str) -> float:
    found = [each["end"] - each["start"] for each in actions if (each["stage"], each["kind"]) == (stage, kind)]
    return fmean(found) if found else 0.0


def _one_by_one(rows: dict[int, list[tuple[str, int, int]]], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Actions in the order of each rank, with these durations, one after the other."""
    return [
        {"rank": rank, "stage": stage, "kind": kind, "microbatch": microbatch, "start": 10.0 * index, "end": end}
        for rank, row in rows.items()
        for index, (kind, stage, microbatch) in enumerate(row)
        for end in [10.0 * index + seconds[kind]]
    ]


def _one_forward_one_backward(ranks: int, microbatches: int) -> dict[int, list[tuple[str, int, int]]]:
    rows = {}
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        row = [("F", rank, number) for number in range(ahead)]
        for number in range(microbatches):
            row.append(("B", rank, number))
            row += [("F", rank, number + ahead)] if number + ahead < microbatches else []
        rows[rank] = row
    return rows


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_the_ideal_bubble_of_1f1b_is_that_of_its_formula(ranks: int, microbatches: int) -> None:
    rows = _one_forward_one_backward(ranks, microbatches)
    found = bubble(_one_by_one(rows, {"F": 1.0, "B": 2.0})).ideal
    assert found == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_split_backwards_wait_for_what_they_need_alone() -> None:
    rows = {0: [("F", 0, 0), ("I", 0, 0), ("W", 0, 0)], 1: [("F", 1, 0), ("I", 1, 0), ("W", 1, 0)]}
    found = bubble(_one_by_one(rows, {"F": 1.0, "I": 1.0, "W": 1.0})).ideal
    assert found == pytest.approx(1 - 6 / (2 * 5))  # F0 F1 I1 (W1 beside I0) W0


def test_a_bubble_needs_all_ranks_of_a_pipeline() -> None:
    rows = _one_forward_one_backward(2, 2)
    with pytest.raises(ValueError, match="some ranks' actions are missing"):
        bubble([action for action in _one_by_one(rows, {"F": 1.0, "B": 2.0}) if action["rank"] == 1])
    with pytest.raises(ValueError, match="build the engine with record_timeline=True"):
        bubble([])


def test_a_trace_is_what_perfetto_reads() -> None:
    trace = json.loads(json.dumps(chrome_trace(_one_by_one(_one_forward_one_backward(2, 2), {"F": 1.0, "B": 2.0}))))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in slices if event["cat"] == "forward"} == {"F 0", "F 1"}
    assert sum(event["name"] == "idle" for event in slices) == 2 * 3
    assert all(event["dur"] >= 0 and {"pid", "tid", "ts"} <= event.keys() for event in slices)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {"rank 0", "rank 1"}
