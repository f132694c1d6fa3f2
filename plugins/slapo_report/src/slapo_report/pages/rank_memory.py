"""Memory of the ranks of a plan: bars of equal ranks together, and a table of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..charts.line_chart import Limit
from ..charts.stacked_bars import StackedBar, stacked_bars
from ..tables import Cell, sortable_table
from ..units import byte_scale, format_bytes, format_percent

MOST_ROWS = 48
"""Rows of the chart; of more, those with the most memory are drawn."""

MOST_STAGES = 4
"""Stages that are named beside a row."""

Ranks = Mapping[str, Any]


def peak_of(ranks: Ranks) -> float:
    """Return the bytes at the peak: ``peak_bytes``, or the sum over the kinds."""
    peak: float | None = ranks.get("peak_bytes")
    return peak if peak is not None else sum(ranks.get("memory", {}).values())


def count_of(ranks: Ranks) -> int:
    """Return the number of ranks of an entry: ``count``, or all from the first to the last."""
    first, last = ranks.get("ranks") or (0, 0)
    count: int = ranks.get("count", last - first + 1)
    return count


def name_of(ranks: Ranks) -> str:
    """Return ``rank 3``, ``ranks 0-127``, ``64 of ranks 0-127`` if not all between the ends are meant, or ``pp rank 3``."""
    if "ranks" not in ranks:
        return f"pp rank {ranks['rank']}"
    first, last = ranks["ranks"]
    name = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return name if count_of(ranks) == last - first + 1 else f"{count_of(ranks)} of {name}"


def join_equal(entries: Sequence[Ranks]) -> list[Ranks]:
    """Return the entries, neighbours that differ in their ranks alone as one."""
    joined: list[Ranks] = []
    for entry in entries:
        before = joined[-1] if joined else None
        if before is not None and _continues(before, entry):
            first, last = before["ranks"][0], entry["ranks"][1]
            joined[-1] = {**before, "ranks": [first, last], "count": last - first + 1}
        else:
            joined.append(entry)
    return joined


def _continues(before: Ranks, entry: Ranks) -> bool:
    if "ranks" not in before or "ranks" not in entry:
        return False
    whole = all(count_of(each) == each["ranks"][1] - each["ranks"][0] + 1 for each in (before, entry))
    same = all(before.get(key) == entry.get(key) for key in ("stages", "memory", "peak_bytes", "when"))
    return whole and same and before["ranks"][1] + 1 == entry["ranks"][0]


def memory_bars(entries: Sequence[Ranks], limit: Limit | None) -> str:
    """Return the bars of the fullest ranks, in the order of ranks, as a ``figure``."""
    fullest = set(map(id, sorted(entries, key=peak_of, reverse=True)[:MOST_ROWS]))
    shown = [entry for entry in entries if id(entry) in fullest]
    bars = [StackedBar(name_of(each), each.get("memory", {}), peak_of(each), _stage_words(each)) for each in shown]
    scale = byte_scale(max([*(bar.shown_total for bar in bars), limit.value if limit else 0]))
    title = "At the peak of each rank"
    if len(shown) < len(entries):
        title += f", the fullest {len(shown)} of {len(entries)} rows"
    return stacked_bars(title, bars, scale, limit=limit)


def memory_table(entries: Sequence[Ranks], limit: Limit | None) -> str:
    """Return the sortable table of all entries: ranks, stages, bytes of each kind and at the peak."""
    kinds = list(dict.fromkeys(kind for entry in entries for kind in entry.get("memory", {})))
    with_when = any(entry.get("when") for entry in entries)
    head = ["ranks", "number", "stages", *kinds, "peak"] + ["of the device"] * (limit is not None) + ["when"] * with_when
    rows = [[*_cells(entry, kinds, limit), *([entry.get("when")] if with_when else [])] for entry in entries]
    return sortable_table(head, rows, "Memory of the ranks")


def _cells(entry: Ranks, kinds: Sequence[str], limit: Limit | None) -> list[object]:
    memory, peak = entry.get("memory", {}), peak_of(entry)
    stages = ", ".join(map(str, entry.get("stages", ())))
    cells: list[object] = [Cell(name_of(entry), (entry.get("ranks") or [entry.get("rank")])[0]), count_of(entry), stages]
    cells += [Cell(format_bytes(memory[kind]), memory[kind]) if kind in memory else None for kind in kinds]
    cells.append(Cell(format_bytes(peak), peak))
    return [*cells, Cell(format_percent(peak / limit.value), peak)] if limit else cells


def _stage_words(entry: Ranks) -> str:
    stages = list(entry.get("stages", ()))
    if not stages:
        return ""
    named = ", ".join(map(str, stages[:MOST_STAGES])) + (", ..." if len(stages) > MOST_STAGES else "")
    return f"{'stage' if len(stages) == 1 else 'stages'} {named}"
