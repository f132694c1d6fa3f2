"""Heat map of the bytes that groups of ranks send to one another."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from itertools import repeat

from ..units import format_bytes
from .mark_frame import mark_frame

MOST_GROUPS = 32
"""Rows of the map; more groups are drawn as neighbours together."""

LOG_FROM = 50
"""Ratio of the largest to the smallest traffic from which shades are logarithmic."""


def traffic_matrix(title: str, labels: Sequence[str], sent: Sequence[Sequence[float]]) -> str:
    """Return a heat map of traffic as an HTML ``figure``.

    Args:
        title: Heading of the figure.
        labels: Names of the ranks, or groups of ranks.
        sent: ``sent[a][b]`` is the number of bytes from ``a`` to ``b`` in a step.

    Raises:
        ValueError: ``sent`` is not square, or there are no labels.
    """
    if not labels or len(sent) != len(labels) or any(len(row) != len(labels) for row in sent):
        raise ValueError(
            f"traffic_matrix: {len(labels)} labels for {len(sent)} rows of {sorted({len(row) for row in sent})} values; "
            "give each label a row and a column"
        )
    labels, sent = _sum_neighbours(labels, sent)
    found = [value for row in sent for value in row if value > 0]
    smallest, largest = min(found, default=0.0), max(found, default=0.0)
    log = smallest > 0 and largest / smallest > LOG_FROM
    shades = [[_shade(value, smallest, largest, log) for value in row] for row in sent]
    cells = "".join(map(_row, labels, repeat(labels), sent, shades))
    heads = "".join(f'<span class="to">{escape(label)}</span>' for label in labels)
    grid = f'<div class="heat" style="--columns:{len(labels)}"><span class="corner">from \\ to</span>{heads}{cells}</div>'
    low = format_bytes(smallest) if log else "0"
    scale = (
        f'<span class="ramp-label">{low}</span><span class="ramp"></span>'
        f'<span class="ramp-label">{format_bytes(largest)}{", log scale" if log else ""}</span>'
    )
    frame = mark_frame(
        grid, f"{title}: {len(labels)} rows and columns, the largest {format_bytes(largest)}", columns=len(labels)
    )
    return f"""
<figure class="traffic">
<figcaption><h3>{escape(title)}</h3><span class="legend">{scale}</span></figcaption>
{frame}
</figure>"""


def _row(source: str, labels: Sequence[str], values: Sequence[float], shades: Sequence[float]) -> str:
    return f'<span class="from">{escape(source)}</span>' + "".join(map(_cell, repeat(source), labels, values, shades))


def _cell(source: str, target: str, value: float, shade: float) -> str:
    title = f"from {source} to {target}: {format_bytes(value)}" if value > 0 else f"from {source} to {target}: nothing"
    return f'<i class="cell" style="--shade:{shade:.3f}" title="{escape(title)}"></i>'


def _shade(value: float, smallest: float, largest: float, log: bool) -> float:
    """Return the opacity of a cell; one with traffic is never as pale as one without."""
    if value <= 0:
        return 0.0
    part = math.log(value / smallest) / math.log(largest / smallest) if log else value / largest
    return 0.12 + 0.88 * part


def _sum_neighbours(labels: Sequence[str], sent: Sequence[Sequence[float]]) -> tuple[Sequence[str], Sequence[Sequence[float]]]:
    """Return the sums over neighbours, so that ``MOST_GROUPS`` or fewer are left."""
    every = math.ceil(len(labels) / MOST_GROUPS)
    if every == 1:
        return labels, sent
    starts = range(0, len(labels), every)
    ranges = [range(start, min(start + every, len(labels))) for start in starts]
    names = [_name_of_all(labels[each[0]], labels[each[-1]]) for each in ranges]
    return names, [[sum(sent[a][b] for a in rows for b in columns) for columns in ranges] for rows in ranges]


def _name_of_all(first: str, last: str) -> str:
    """Return the name of neighbours: ``ranks 0-255`` for ``ranks 0-127`` to ``ranks 128-255``."""
    if first == last:
        return first
    numbers = [re.fullmatch(r"(?:ranks? )?(\d+)(?:-(\d+))?", each) for each in (first, last)]
    if numbers[0] and numbers[1]:
        return f"ranks {numbers[0][1]}-{numbers[1][2] or numbers[1][1]}"
    return f"{first} ... {last}"
