"""The pipeline's timeline of a recorded step, with its bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slapo_report import timeline as timeline_figure
from slapo_torch.timeline import COMPUTES, MESSAGES, Bubble, bubble

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
    found = ", ".join(f"{100 * each.measured:.0f}% ({100 * each.ideal:.0f}%)" for each in _bubbles(events))
    bubbles = f"Bubble {found}; {WAITS}; " if found else ""
    note = f"{bubbles}{BUSY}{ON_GPUS if device == 'cuda' else ''}."
    return timeline_figure(events, title="Last step", note=note, names=COMPUTES)


def _bubbles(events: Sequence[Mapping[str, Any]]) -> list[Bubble]:
    """One for each pipeline: for each replica, that of its first tensor-parallel rank. None for actions of other engines."""
    own = [event for event in events if event["kind"] in COMPUTES and event.get("tp") == 0]
    replicas = sorted({event["dp"] for event in own})
    return [bubble([event for event in own if event["dp"] == replica]) for replica in replicas]
