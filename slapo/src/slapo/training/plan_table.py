"""Tables of a plan, on the terminal and on its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

from rich.console import Console  # noqa: TID253
from rich.table import Table  # noqa: TID253

from slapo_plan import Plan
from slapo_report import format_bytes, format_percent, format_seconds

_REASONS = 5
"""Number of rejected layouts to print."""


def candidate_rows(found: Plan, top: int, seq: int) -> list[dict[str, Any]]:
    """Return the best layouts as plain data, with ``why`` each is slower than the best; a sequence has ``seq`` tokens."""
    rows = []
    limit, best = found.hardware.usable_bytes, found.best
    for each in found.candidates[:top]:
        settings = each.settings
        tokens = settings["rows"] * settings["microbatches"] * settings["dp"] * seq
        rows.append(
            {
                "layout": str(each.layout),
                "recomputed": f"{settings['checkpointed']}/{len(each.paths)}",
                "peak_bytes": each.peak,
                "limit_bytes": limit,
                "step_seconds": each.step_seconds,
                "tokens_per_second": tokens / each.step_seconds if each.step_seconds else 0.0,
                "bubble": each.bubble,
                "mfu": each.mfu,
                "why": "the fastest" if each is best else _reason(best, each),
            }
        )
    return rows


def plan_table(found: Plan, top: int, seq: int) -> str:
    """Return the table of the best layouts as text."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "layout", "recomputed", "memory", "step", "tokens/s", "bubble", "MFU", "why"):
        table.add_column(title, no_wrap=title != "why", justify="left" if title in ("layout", "why") else "right")
    for number, row in enumerate(candidate_rows(found, top, seq), 1):
        memory = f"{format_bytes(row['peak_bytes'])} of {format_bytes(row['limit_bytes'])}"
        shares = [format_percent(row["bubble"]), format_percent(row["mfu"])]
        cells = [
            row["layout"],
            row["recomputed"],
            memory,
            format_seconds(row["step_seconds"]),
            f"{row['tokens_per_second']:,.0f}",
        ]
        table.add_row(str(number), *cells, *shares, row["why"])
    out = StringIO()
    Console(file=out, width=200).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def reasons(rejected: Sequence[Any]) -> Iterator[str]:
    """Iterate over lines on layouts that do not fit."""
    for each in rejected[:_REASONS]:
        yield f"does not fit: {each}"
    if len(rejected) > _REASONS:
        yield f"and {len(rejected) - _REASONS} more layouts that do not fit"


def _reason(best: Any, other: Any) -> str:
    """Return what makes a layout slower than the best: its largest loss."""
    layout = other.layout

    def passes(each: Any) -> float:
        total = sum(stage.forward + stage.backward for stage in each.stages)
        return float(each.layout.microbatches * total / len(each.stages))

    losses = {
        "waits in the pipeline": other.bubble * other.step_seconds - best.bubble * best.step_seconds,
        "slower passes" + (", more messages" if layout.tp > best.layout.tp else ""): passes(other) - passes(best),
        "more reduction and optimizer": other.after - best.after,
    }
    slower = max(0.0, other.step_seconds / best.step_seconds - 1) if best.step_seconds else 0.0
    loss = max(losses, key=lambda name: losses[name])
    return f"{slower:.0%} slower" + (f": {loss}" if losses[loss] > 0 else "")
