"""Timeline of the ranks of a pipeline, as a trace for Perfetto or Chrome, and its bubble as one number."""

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
"""Kinds of actions that are messages. A send is its start alone; a receive lasts from its start to the use of its value."""

Action = Mapping[str, Any]


class Bubble(NamedTuple):
    """Share of all ranks' time without computation.

    Args:
        measured: The share between the first forward and the last backward.
        ideal: The share for this order of actions, if each action took its mean time and messages took no time.
    """

    measured: float
    ideal: float


def bubble(actions: Sequence[Action]) -> Bubble:
    """Return the idle share of the ranks of one pipeline.

    Args:
        actions: Concatenated ``engine.timeline`` of all ranks of one pipeline: equal ``dp`` and equal ``tp``.

    Raises:
        ValueError: there are no actions, or those of some ranks are missing.
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
    """Return the seconds of computation, and of the whole step if each action starts as soon as its inputs are there."""
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
    kind = "B" if action["kind"] == "I" else action["kind"]  # the previous stage needs the input gradients only
    return kind, action["stage"], action["microbatch"]


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    """Return the keys of the actions that must end before an action starts."""
    stage, microbatch = action["stage"], action["microbatch"]
    if action["kind"] == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if action["kind"] == "W":
        return [("B", stage, microbatch)]
    return [("F", stage, microbatch), *([("B", stage + 1, microbatch)] if stage < last else [])]


def chrome_trace(actions: Sequence[Action]) -> dict[str, Any]:
    """Return a trace for https://ui.perfetto.dev or Chrome's ``about:tracing``; write it as JSON.

    Each rank is a process with three tracks: computation and idle time, sends, and receives. Times are in microseconds from
    the first action.

    Args:
        actions: Concatenated ``engine.timeline`` of all ranks.
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
    name = kind if action["microbatch"] is None else f"{kind} {action['microbatch']}"
    category = {**COMPUTES, **MESSAGES}.get(kind, str(kind))
    made = _slice(name, category, action["rank"], track, action["start"] - origin, action["end"] - origin)
    return {**made, "args": {"stage": action["stage"], "micro-batch": action["microbatch"]}}


def _slice(name: str, category: str, rank: int, track: int, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, "ts": start * 1e6, "dur": (end - start) * 1e6}
