"""Line charts as SVG in HTML, and their axes: lines stretch with the page, text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..run_data.settings import format_count


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
    """A chart over steps as an HTML ``figure``; its plot carries ``data-chart`` for the script's crosshair."""
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


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis.

    Args:
        low: Value at its beginning.
        high: Value at its end; above ``low``.
        ticks: Values to label.
        log: Whether it is logarithmic.
    """

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value in percent of the axis; values outside are put at the nearer end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return min(100.0, max(0.0, 100 * (value - low) / (high - low)))


def linear_axis(values: Iterable[float], num_ticks: int = 5) -> Axis:
    """Return an axis over the finite values, with round ticks and a margin at both ends."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    step = _round_step((high - low) / num_ticks)
    first = math.ceil(low / step)
    return Axis(low, high, [index * step for index in range(first, math.floor(high / step) + 1)])


def log_axis(values: Iterable[float], floor: float) -> Axis:
    """Return an axis of whole decades over the finite values; values below ``floor``, including zero, lie at ``floor``."""
    finite = [max(value, floor) for value in values if math.isfinite(value)] or [floor]
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    high = max(high, low + 1)
    every = max(1, (high - low) // 5)
    return Axis(10.0**low, 10.0**high, [10.0**power for power in range(low, high + 1, every)], log=True)


def step_axis(num_steps: int, num_ticks: int = 6) -> Axis:
    """Return an axis over steps 1 to ``num_steps``, with integer ticks that include the first and the last."""
    every = max(1, int(_round_step(num_steps / num_ticks)))
    inner = [step for step in range(every, num_steps, every) if num_steps - step > every / 2 and step > 1]
    return Axis(1, max(num_steps, 2), sorted({1, *inner, num_steps}))


def _round_step(rough: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
