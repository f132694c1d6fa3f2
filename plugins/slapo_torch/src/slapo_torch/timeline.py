"""When the ranks of a pipeline computed, sent and waited: as a trace for Perfetto or Chrome, and as one number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

__all__ = ["Bubble", "COMPUTES", "MESSAGES", "bubble", "chrome_trace"]

COMPUTES = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}
"""Kinds of actions in which a rank computes."""

MESSAGES = {
    "SEND_F": "send activations",
    "SEND_B": "send gradients",
    "RECV_F": "receive activations",
    "RECV_B": "receive gradients",
}
"""Kinds of actions that are messages: a send when it is begun; a receive from when it is begun to when its value is used."""

Action = Mapping[str, Any]


class Bubble(NamedTuple):
    """The share of all ranks' time in which they do not compute.

    Args:
        measured: From the first forward to the last backward.
        ideal: The same for this order of actions if each took its mean time and messages took none.
    """

    measured: float
    ideal: float


def bubble(actions: Sequence[Action]) -> Bubble:
    """How idle the ranks of one pipeline are.

    Args:
        actions: ``engine.timeline`` of all ranks of one pipeline, put together: those with one ``dp`` and one ``tp``.

    Raises:
        ValueError: there are none, or some ranks' are missing.
    """
    computing = sorted((action for action in actions if action["kind"] in COMPUTES), key=lambda action: action["start"])
    if not computing:
        raise ValueError("no actions; build the engine with record_timeline=True and run a step")
    by_rank: dict[int, list[Action]] = defaultdict(list)
    for action in computing:
        by_rank[action["rank"]].append(action)
    span = max(action["end"] for action in computing) - computing[0]["start"]
    busy = sum(action["end"] - action["start"] for action in computing)
    seconds, ideal_span = _ideal(by_rank)
    return Bubble(1 - busy / (len(by_rank) * span), 1 - seconds / (len(by_rank) * ideal_span))


def _ideal(by_rank: Mapping[int, Sequence[Action]]) -> tuple[float, float]:
    """Seconds of work, and from the first action's start to the last one's end, if each began as soon as it could."""
    durations: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in by_rank.values():
        for action in row:
            durations[action["stage"], action["kind"]].append(action["end"] - action["start"])
    seconds = {key: mean(found) for key, found in durations.items()}
    waiting = {rank: list(reversed(row)) for rank, row in by_rank.items()}
    done: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(waiting, 0.0)
    last = max(action["stage"] for row in by_rank.values() for action in row)
    while any(waiting.values()):
        ready = [rank for rank, row in waiting.items() if row and all(need in done for need in _needs(row[-1], last))]
        if not ready:
            raise ValueError("some ranks' actions are missing; give those of all ranks of one pipeline")
        for rank in ready:
            action = waiting[rank].pop()
            begin = max([free[rank], *(done[need] for need in _needs(action, last))])
            free[rank] = done[_key(action)] = begin + seconds[action["stage"], action["kind"]]
    return sum(seconds[key] * len(found) for key, found in durations.items()), max(free.values())


def _key(action: Action) -> tuple[str, int, int]:
    kind = "B" if action["kind"] == "I" else action["kind"]  # what the stage before waits for
    return kind, action["stage"], action["microbatch"]


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    """What has to be done before an action."""
    stage, microbatch = action["stage"], action["microbatch"]
    if action["kind"] == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if action["kind"] == "W":
        return [("B", stage, microbatch)]
    return [("F", stage, microbatch), *([("B", stage + 1, microbatch)] if stage < last else [])]


def chrome_trace(actions: Sequence[Action]) -> dict[str, Any]:
    """A trace that https://ui.perfetto.dev and Chrome's ``about:tracing`` open, once written as JSON.

    A process per rank, with a track each for what it computes and where it is idle, what it sends, and what it receives;
    times in microseconds from the first action.

    Args:
        actions: ``engine.timeline`` of all ranks, put together.
    """
    origin = min((action["start"] for action in actions), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted({action["rank"] for action in actions}):
        own = sorted((action for action in actions if action["rank"] == rank), key=lambda action: action["start"])
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for track, name in enumerate(("compute", "send", "receive")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})
        events += [_event(action, origin) for action in own]
        computing = [action for action in own if action["kind"] in COMPUTES]
        for before, after in zip(computing, computing[1:], strict=False):
            events.append(_slice("idle", "idle", rank, 0, before["end"] - origin, after["start"] - origin))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(action: Action, origin: float) -> dict[str, Any]:
    kind = action["kind"]
    track = 0 if kind not in MESSAGES else 1 if kind.startswith("SEND") else 2
    name, category = f"{kind} {action['microbatch']}", {**COMPUTES, **MESSAGES}.get(kind, str(kind))
    made = _slice(name, category, action["rank"], track, action["start"] - origin, action["end"] - origin)
    return {**made, "args": {"stage": action["stage"], "micro-batch": action["microbatch"]}}


def _slice(name: str, category: str, rank: int, track: int, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, "ts": start * 1e6, "dur": (end - start) * 1e6}
