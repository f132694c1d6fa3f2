"""Points in a plot, with a curve of steps behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .axes import Axis
from .mark_frame import mark_frame

STYLES = ("done", "stopped", "failed", "best")
"""Looks of a point: filled, hollow, a red square, large."""


@dataclass(frozen=True)
class Point:
    """One point.

    Args:
        x: Place on the axis.
        y: Place on the axis; None lies at the bottom.
        style: One of ``STYLES``.
        title: Text that reads the point.
        interval: Ends of a bar through the point.
    """

    x: float
    y: float | None
    style: str
    title: str
    interval: tuple[float, float] | None = None


def scatter(
    title: str,
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    *,
    x_label: str,
    y_label: str,
    legend: Sequence[tuple[str, str]],
    curve: Sequence[tuple[float, float]] = (),
    diagonal: bool = False,
) -> str:
    """Return points as an HTML ``figure``.

    Args:
        title: Heading of the figure.
        points: In the order of reading.
        x: The axis to the right.
        y: The axis upwards.
        x_label: Quantity and unit of ``x``.
        y_label: Quantity and unit of ``y``.
        legend: Pairs of a style, or ``"curve"``, and its name.
        curve: Corners of a curve that keeps its value until the next corner.
        diagonal: Draw the line on which both coordinates are equal.
    """
    keys = "".join(f'<span class="mark-key {style}">{escape(name)}</span>' for style, name in legend)
    marks = "".join(_interval(point, x, y) for point in points) + "".join(_point(point, x, y) for point in points)
    line = f'<path class="line own" d="{_stairs(curve, x, y)}"/>' if curve else ""
    low, high = max(x.low, y.low), min(x.high, y.high)
    if diagonal and low < high:
        line += f'<path class="line even" d="M{x.at(low):.2f} {100 - y.at(low):.2f} L{x.at(high):.2f} {100 - y.at(high):.2f}"/>'
    plot = f"""<div class="plot">
<div aria-hidden="true">{_ticks(x, y)}</div>
<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{_grid(y)}{line}</svg>
{marks}
</div>
<div class="x-label">{escape(x_label)}</div>"""
    return f"""
<figure class="chart">
<figcaption><h3>{escape(title)}</h3><span class="legend">{keys}</span></figcaption>
<div class="y-label">{escape(y_label)}</div>
{mark_frame(plot, f"{title}: {len(points)} points, {y_label} over {x_label}")}
</figure>"""


def _point(point: Point, x: Axis, y: Axis) -> str:
    top = 100.0 if point.y is None or not math.isfinite(point.y) else 100 - y.at(point.y)
    place = f"left:{x.at(point.x):.2f}%;top:{top:.2f}%"
    return f'<i class="point {point.style}" style="{place}" title="{escape(point.title)}"></i>'


def _interval(point: Point, x: Axis, y: Axis) -> str:
    if point.interval is None:
        return ""
    low, high = sorted(point.interval)
    top, height = 100 - y.at(high), y.at(high) - y.at(low)
    return f'<i class="interval" style="left:{x.at(point.x):.2f}%;top:{top:.2f}%;height:{height:.2f}%"></i>'


def _stairs(corners: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    words = [f"M{x.at(corners[0][0]):.2f} {100 - y.at(corners[0][1]):.2f}"]
    words += [f"H{x.at(at):.2f} V{100 - y.at(value):.2f}" for at, value in corners[1:]]
    return " ".join(words)


def _ticks(x: Axis, y: Axis) -> str:
    below = "".join(f'<span class="tick x" style="left:{x.at(value):.2f}%">{value:.6g}</span>' for value in x.ticks)
    beside = "".join(f'<span class="tick y" style="top:{100 - y.at(value):.2f}%">{value:.6g}</span>' for value in y.ticks)
    return below + beside


def _grid(y: Axis) -> str:
    return "".join(f'<path class="grid" d="M0 {100 - y.at(value):.2f} h100"/>' for value in y.ticks)
