"""The pipeline's timeline: a row per rank, a bar per forward or backward of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from slapo_torch.timeline import COMPUTES, MESSAGES, Bubble, bubble

from .charts import linear_axis

WAITS = (
    "bubble: the share of the ranks' time in which they do not compute, and, in brackets, what it would be for this order of "
    "actions if each took its mean time and messages took none"
)

BUSY = (
    "busy: the share of the time from the first forward to the last backward of all ranks that this rank was inside of one; "
    "waiting for another stage is idle, waiting for tensor-parallel or data-parallel ranks within a forward or backward is busy"
)

ON_GPUS = "; a GPU's bars are the times at which it was given the work, not those at which it did it"


def timeline(events: Sequence[Mapping[str, Any]], device: str = "cpu") -> str:
    """The timeline of one step as an HTML ``figure``, times in milliseconds from the first event.

    Args:
        events: Actions as in ``RunRecord.timeline``, their times taken on the host.
        device: ``"cpu"`` or ``"cuda"``, where they ran.
    """
    events = [event for event in events if event["kind"] not in MESSAGES]
    if not events:
        return '<p class="empty">The engine recorded no timeline for this run.</p>'
    origin, end = min(event["start"] for event in events), max(event["end"] for event in events)
    span = max(end - origin, 1e-9)
    ranks = sorted({event["rank"] for event in events})
    rows = "".join(_row(rank, [event for event in events if event["rank"] == rank], origin, span) for rank in ranks)
    shown = {str(event["kind"]) for event in events} | {"F", "B"}
    found = ", ".join(f"{100 * each.measured:.0f}% ({100 * each.ideal:.0f}%)" for each in _bubbles(events))
    bubbles = f"Bubble {found}; {WAITS}; " if found else ""
    legend = "".join(f'<span class="key bar-{kind}">{name}</span>' for kind, name in COMPUTES.items() if kind in shown)
    return f"""
<figure class="timeline">
<figcaption><h3>Last step</h3><span class="legend">{legend}<span class="key bar-idle">idle</span></span></figcaption>
{rows}
<div class="row axis" aria-hidden="true"><span></span><div class="track">{_ticks(span)}</div><span></span></div>
<div class="x-label">milliseconds; the number in a bar is its micro-batch, which narrow bars have in their tooltip</div>
<p class="note">{bubbles}{BUSY}{ON_GPUS if device == "cuda" else ""}.</p>
</figure>"""


def _bubbles(events: Sequence[Mapping[str, Any]]) -> list[Bubble]:
    """One for each pipeline: for each replica, that of its first tensor-parallel rank. None for actions of other engines."""
    own = [event for event in events if event["kind"] in COMPUTES and event.get("tp") == 0]
    replicas = sorted({event["dp"] for event in own})
    return [bubble([event for event in own if event["dp"] == replica]) for replica in replicas]


def _row(rank: int, events: Sequence[Mapping[str, Any]], origin: float, span: float) -> str:
    bars = "".join(_bar(event, origin, span) for event in sorted(events, key=lambda event: event["start"]))
    busy = 100 * sum(event["end"] - event["start"] for event in events) / span
    stages = ", ".join(sorted({str(event["stage"]) for event in events}))
    return (
        f'<div class="row"><span class="who">rank {rank} <small>stage {escape(stages)}</small></span>'
        f'<div class="track">{bars}</div><span class="busy">{busy:.0f}% busy</span></div>'
    )


def _bar(event: Mapping[str, Any], origin: float, span: float) -> str:
    left, width = 100 * (event["start"] - origin) / span, 100 * (event["end"] - event["start"]) / span
    kind, microbatch = str(event["kind"]), escape(str(event["microbatch"]))
    name = COMPUTES.get(kind, kind)
    start, length = 1e3 * (event["start"] - origin), 1e3 * (event["end"] - event["start"])
    title = f"{name} of micro-batch {microbatch}, stage {event['stage']}: {length:.2f} ms from {start:.2f} ms"
    style = kind if kind in COMPUTES else "other"
    return f'<i class="bar bar-{style}" style="left:{left:.3f}%;width:{width:.3f}%" title="{escape(title)}">{microbatch}</i>'


def _ticks(span: float) -> str:
    axis = linear_axis([0.0, 1e3 * span])
    inside = [tick for tick in axis.ticks if 0 <= tick <= 1e3 * span]
    return "".join(f'<span class="tick x" style="left:{tick / (10 * span):.2f}%">{tick:g}</span>' for tick in inside)
