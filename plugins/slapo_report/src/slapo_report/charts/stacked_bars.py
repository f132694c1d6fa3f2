"""Stacked bars: a row per subject, a part per kind, on a common axis with a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..units import Scale, format_percent
from .axes import Axis, axis_from_zero
from .line_chart import Limit
from .mark_frame import mark_frame

COLOURS = 10
"""Number of colours; further kinds begin with the first again."""


@dataclass(frozen=True)
class StackedBar:
    """One row of a chart of stacked bars.

    Args:
        name: Subject of the row, e.g. ``"ranks 0-127"``.
        parts: Kind to its value; none negative.
        total: Number beside the bar, where it is not the sum of the parts; a larger total gives a part ``"other"``.
        detail: Second, smaller line below the name.
    """

    name: str
    parts: Mapping[str, float]
    total: float | None = None
    detail: str = ""

    @property
    def shown_parts(self) -> dict[str, float]:
        """The parts above 0, and what is left of the total if that is more than a thousandth of it."""
        parts = {kind: value for kind, value in self.parts.items() if value > 0}
        rest = self.shown_total - sum(parts.values())
        return {**parts, "other": parts.get("other", 0) + rest} if rest > 1e-3 * self.shown_total else parts

    @property
    def shown_total(self) -> float:
        """The total, or the sum of the parts."""
        return sum(self.parts.values()) if self.total is None else self.total


def stacked_bars(title: str, bars: Sequence[StackedBar], scale: Scale, *, limit: Limit | None = None) -> str:
    """Return rows of stacked bars as an HTML ``figure``.

    Args:
        title: Heading of the figure.
        bars: The rows, from top to bottom; at least one. The legend of a single one has its values.
        scale: Unit of all values.
        limit: A value that no bar should pass, drawn through all rows; bars that do are marked.
    """
    kinds = list(dict.fromkeys(kind for bar in bars for kind in bar.shown_parts))
    colours = {kind: index % COLOURS for index, kind in enumerate(kinds)}
    largest = max(max(bar.shown_total, sum(bar.shown_parts.values())) for bar in bars)
    axis = axis_from_zero(max(largest, 1.05 * limit.value if limit else 0.0) / scale.size)
    single = bars[0].shown_parts if len(bars) == 1 else {}
    names = {kind: f"{kind} {scale.format(single[kind])}" if single else kind for kind in kinds}
    legend = "".join(f'<span class="key part-{colours[kind]}">{escape(name)}</span>' for kind, name in names.items())
    rows = "".join(_row(bar, axis, scale, colours, limit) for bar in bars)
    drawn = (_limit_label(limit, axis, scale) if limit else "") + rows + _ticks(axis, scale)
    frame = drawn if single else mark_frame(drawn, f"{title}: {len(bars)} rows, in {scale.unit}")
    return f"""
<figure class="stacked">
<figcaption><h3>{escape(title)}</h3><span class="legend">{legend}</span></figcaption>
{frame}
</figure>"""


def _row(bar: StackedBar, axis: Axis, scale: Scale, colours: Mapping[str, int], limit: Limit | None) -> str:
    pieces, left = [], 0.0
    for kind, value in bar.shown_parts.items():
        width = axis.at((left + value) / scale.size) - axis.at(left / scale.size)
        share = format_percent(value / bar.shown_total) if bar.shown_total else ""
        title = f"{bar.name}, {kind}: {scale.format(value)}, {share} of {scale.format(bar.shown_total)}"
        pieces.append(
            f'<i class="part part-{colours[kind]}" style="left:{axis.at(left / scale.size):.3f}%;width:{width:.3f}%"'
            f' title="{escape(title)}">{scale.format(value).replace(" ", "&nbsp;")}</i>'
        )
        left += value
    over = limit is not None and bar.shown_total > limit.value
    line = f'<span class="limit-mark" style="left:{axis.at(limit.value / scale.size):.3f}%"></span>' if limit else ""
    total = f'<span class="busy{" over" if over else ""}">{escape(scale.format(bar.shown_total))}</span>'
    detail = f" <small>{escape(bar.detail)}</small>" if bar.detail else ""
    return (
        f'<div class="row"><span class="who">{escape(bar.name)}{detail}</span>'
        f'<div class="track">{"".join(pieces)}{line}</div>{total}</div>'
    )


def _ticks(axis: Axis, scale: Scale) -> str:
    ticks = "".join(f'<span class="tick x" style="left:{axis.at(tick):.2f}%">{tick:g}</span>' for tick in axis.ticks)
    row = f'<div class="row axis" aria-hidden="true"><span></span><div class="track">{ticks}</div><span></span></div>'
    return f'{row}<div class="x-label">{escape(scale.unit)}</div>'


def _limit_label(limit: Limit, axis: Axis, scale: Scale) -> str:
    at = axis.at(limit.value / scale.size)
    place = f"padding-right:{100 - at:.3f}%;text-align:right" if at > 50 else f"padding-left:{at:.3f}%"
    label = f'<span style="{place}">{escape(f"{limit.name}: {scale.format(limit.value)}")}</span>'
    return f'<div class="row limit-row"><span></span><div class="track">{label}</div><span></span></div>'
