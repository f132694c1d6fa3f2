"""Line charts as SVG in HTML: lines stretch with the page, text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..units import format_count
from .axes import Axis


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        name: For the legend.
        style: CSS class that gives colour and stroke.
        values: One per step, from step 1; a value that is not a finite number is a gap.
    """

    name: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True)
class Limit:
    """A horizontal line with its label."""

    name: str
    value: float


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, *, y_label: str, limit: Limit | None = None) -> str:
    """Return a chart over steps as an HTML ``figure``.

    The plot has the attribute ``data-chart``, and the first and the last step as ``data-first`` and ``data-last``.

    Args:
        title: Heading of the figure.
        lines: Drawn in this order, the last on top.
        x: Axis of the steps.
        y: Axis of the values.
        y_label: Quantity and unit of the values.
        limit: Drawn as a dashed line.
    """
    legend = "".join(f'<span class="key {line.style}">{escape(line.name)}</span>' for line in lines)
    drawn = "".join(f'<path class="line {line.style}" d="{_path(line.values, x, y)}"/>' for line in lines)
    summary = "; ".join(f"{line.name}: {_describe(line.values)}" for line in lines)
    return f"""
<figure class="chart">
<figcaption><h3>{escape(title)}</h3><span class="legend">{legend}</span></figcaption>
<div class="y-label">{escape(y_label)}</div>
<div class="plot" data-chart data-first="{x.low:g}" data-last="{x.high:g}">
{_ticks(x, y)}
<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(f"{title}. {summary}")}">
{_grid(y)}{_limit_line(limit, y)}{drawn}
</svg>{_limit_label(limit, y)}
</div>
<div class="x-label">step</div>
</figure>"""


def _path(values: Sequence[float], x: Axis, y: Axis) -> str:
    """SVG path data; a gap begins a new piece, and a single point becomes a short stroke."""
    words, pen = [], "M"
    for step, value in enumerate(values, 1):
        if not math.isfinite(value):
            pen = "M"
            continue
        words.append(f"{pen}{x.at(step):.2f} {100 - y.at(value):.2f}")
        if pen == "M":
            words.append("h.01")
        pen = "L"
    return " ".join(words)


def _ticks(x: Axis, y: Axis) -> str:
    below = "".join(f'<span class="tick x" style="left:{x.at(value):.2f}%">{value:g}</span>' for value in x.ticks)
    beside = "".join(f'<span class="tick y" style="top:{100 - y.at(value):.2f}%">{_number(value)}</span>' for value in y.ticks)
    return f'<div aria-hidden="true">{below}{beside}</div>'


def _grid(y: Axis) -> str:
    return "".join(f'<path class="grid" d="M0 {100 - y.at(value):.2f} h100"/>' for value in y.ticks)


def _limit_line(limit: Limit | None, y: Axis) -> str:
    return f'<path class="line limit" d="M0 {100 - y.at(limit.value):.2f} h100"/>' if limit else ""


def _limit_label(limit: Limit | None, y: Axis) -> str:
    return f'<span class="limit-label" style="top:{100 - y.at(limit.value):.2f}%">{escape(limit.name)}</span>' if limit else ""


def _number(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value and abs(value) < 1e-2 else f"{value:.6g}"


def _describe(values: Sequence[float]) -> str:
    return f"from {values[0]:.4g} to {values[-1]:.4g} in {format_count(len(values), 'step')}" if values else "no values"
