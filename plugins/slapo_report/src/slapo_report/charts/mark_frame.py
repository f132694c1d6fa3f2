"""Frame of a chart whose marks are read one by one, by the pointer or the arrow keys; without a script by their tooltips."""

from __future__ import annotations

from html import escape

HINT = "Point at a mark, or focus the chart and use the arrow keys, to read its value."


def mark_frame(marks: str, label: str, *, columns: int = 1) -> str:
    """Return a chart's marks in a frame with one stop for the tab key, and a line below that says the mark which is read.

    Args:
        marks: HTML in which each mark has a ``title``, in the order of reading.
        label: Name of the chart for screen readers; it is escaped.
        columns: Number of marks that the keys up and down move by.
    """
    return (
        f'<div class="marks" data-marks="{columns}" tabindex="0" role="group" aria-label="{escape(label)}">{marks}</div>'
        f'<p class="picked" aria-live="polite">{HINT}</p>'
    )
