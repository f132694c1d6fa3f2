"""Table of the layouts of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..tables import Cell, sortable_table
from ..units import format_bytes, format_percent, format_seconds

_COLUMNS: dict[str, tuple[str, Callable[[Any], str] | None]] = {
    "layout": ("layout", None),
    "recomputed": ("recomputed", None),
    "peak_bytes": ("memory", format_bytes),
    "step_seconds": ("step", format_seconds),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "bubble": ("bubble", format_percent),
    "mfu": ("MFU", format_percent),
    "why": ("why", None),
}
"""Key to title and format; without a format the value is shown as text."""


def candidate_table(candidates: Sequence[Mapping[str, Any]]) -> str:
    """Return the sortable table of layouts, without the columns that none has; empty without layouts."""
    columns = [key for key in _COLUMNS if any(each.get(key) is not None for each in candidates)]
    if not columns:
        return ""
    rows = [[_cell(key, each.get(key)) for key in columns] for each in candidates]
    return sortable_table([_COLUMNS[key][0] for key in columns], rows, "Layouts, the fastest first")


def _cell(key: str, value: Any) -> object:
    shape = _COLUMNS[key][1]
    if value is None:
        return None
    return Cell(shape(value), value) if shape else str(value)
