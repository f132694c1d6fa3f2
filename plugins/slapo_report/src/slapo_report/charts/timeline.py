"""The timeline of a step: a row per rank, a bar per forward or backward of a micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .axes import linear_axis

ACTIONS = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}
"""Kinds of actions in which a rank computes, with their names in legends and tooltips."""

Action = Mapping[str, Any]


def timeline(
    events: Sequence[Action], *, title: str, note: str, names: Mapping[str, str] = ACTIONS, dense: bool = False
) -> str:
    """Return the timeline of one step as an HTML ``figure``, times in milliseconds from the first event.

    Args:
        events: Actions with ``rank``, ``stage``, ``kind``, ``microbatch``, and ``start`` and ``end`` in seconds; at least one,
            and no messages. An action of the whole step has the micro-batch None.
        title: Heading of the figure.
        note: HTML below the figure.
        names: Kinds with their names, in the legend's order; kinds that are not in ``ACTIONS`` are grey.
        dense: Draw each rank's actions as one picture without tooltips, for steps of many thousands of actions.
    """
    origin, end = min(event["start"] for event in events), max(event["end"] for event in events)
    span = max(end - origin, 1e-9)
    by_rank: dict[int, list[Action]] = defaultdict(list)
    for event in events:
        by_rank[event["rank"]].append(event)
    rows = "".join(_row(rank, by_rank[rank], origin, span, names, dense) for rank in sorted(by_rank))
    shown = {str(event["kind"]) for event in events} | {"F", "B"}
    keys = [(_style(kind), escape(name)) for kind, name in names.items() if kind in shown]
    legend = "".join(f'<span class="key bar-{style}">{name}</span>' for style, name in keys)
    unit = "milliseconds" + (
        "" if dense else "; the number in a bar is its micro-batch, which narrow bars have in their tooltip"
    )
    return f"""
<figure class="timeline">
<figcaption><h3>{escape(title)}</h3><span class="legend">{legend}<span class="key bar-idle">idle</span></span></figcaption>
{rows}
<div class="row axis" aria-hidden="true"><span></span><div class="track">{_ticks(span)}</div><span></span></div>
<div class="x-label">{unit}</div>
<p class="note">{note}</p>
</figure>"""


def _row(rank: int, events: Sequence[Action], origin: float, span: float, names: Mapping[str, str], dense: bool) -> str:
    ordered = sorted(events, key=lambda event: event["start"])
    bars = _picture(rank, ordered, origin, span) if dense else "".join(_bar(event, origin, span, names) for event in ordered)
    busy = 100 * sum(event["end"] - event["start"] for event in events) / span
    stages = ", ".join(sorted({str(event["stage"]) for event in events}))
    return (
        f'<div class="row"><span class="who">rank {rank} <small>stage {escape(stages)}</small></span>'
        f'<div class="track">{bars}</div><span class="busy">{busy:.0f}% busy</span></div>'
    )


def _bar(event: Action, origin: float, span: float, names: Mapping[str, str]) -> str:
    left, width = 100 * (event["start"] - origin) / span, 100 * (event["end"] - event["start"]) / span
    kind = str(event["kind"])
    microbatch = "" if event["microbatch"] is None else escape(str(event["microbatch"]))
    name = names.get(kind, kind)
    start, length = 1e3 * (event["start"] - origin), 1e3 * (event["end"] - event["start"])
    work = f"{name} of micro-batch {microbatch}" if microbatch else name
    title = f"{work}, stage {event['stage']}: {length:.2f} ms from {start:.2f} ms"
    place = f"left:{left:.3f}%;width:{width:.3f}%"
    return f'<i class="bar bar-{_style(kind)}" style="{place}" title="{escape(title)}">{microbatch}</i>'


def _style(kind: str) -> str:
    return kind if kind in ACTIONS else "other"


def _picture(rank: int, events: Sequence[Action], origin: float, span: float) -> str:
    """Return all actions of a rank as one SVG path per kind."""
    paths: dict[str, list[str]] = defaultdict(list)
    for event in events:
        left, width = 1e4 * (event["start"] - origin) / span, 1e4 * (event["end"] - event["start"]) / span
        paths[_style(str(event["kind"]))].append(f"M{left:.1f} 0h{width:.1f}v1h-{width:.1f}z")
    drawn = "".join(f'<path class="dense-{style}" d="{"".join(pieces)}"/>' for style, pieces in sorted(paths.items()))
    label = f"rank {rank}: {len(events)} actions"
    return f'<svg class="dense" viewBox="0 0 10000 1" preserveAspectRatio="none" role="img" aria-label="{label}">{drawn}</svg>'


def _ticks(span: float) -> str:
    axis = linear_axis([0.0, 1e3 * span])
    inside = [tick for tick in axis.ticks if 0 <= tick <= 1e3 * span]
    return "".join(f'<span class="tick x" style="left:{tick / (10 * span):.2f}%">{tick:g}</span>' for tick in inside)
