"""Console output of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console  # noqa: TID253
from rich.markup import escape  # noqa: TID253
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: TID253
from rich.table import Table  # noqa: TID253

from ..run_data.record import RunRecord
from ..run_data.settings import Settings, format_count

MAX_TABLE_ROWS = 50
"""Longest table of losses; longer runs show every so many steps."""


def print_header(console: Console, settings: Settings, source: str) -> None:
    """Print model, batch, layout and data of the run."""
    layout = f"pp {settings.pp} x dp {settings.dp} x tp {settings.tp}"
    ranks, layers, heads = (
        format_count(settings.world_size, "rank"),
        format_count(settings.layers, "layer"),
        format_count(settings.heads, "head"),
    )
    model = f"{settings.model}: {layers}, hidden {settings.hidden}, {heads}"
    parts = format_count(settings.microbatches, "micro-batch", "micro-batches")
    batch = f"batch {settings.batch} x {settings.seq} bytes, {parts}"
    console.print(
        f"[bold]{escape(model)}[/]; {batch}; {ranks} ({layout}) on {settings.device}", highlight=False, soft_wrap=True
    )
    console.print(f"data: {escape(source)}", highlight=False, soft_wrap=True)


def with_progress(console: Console, title: str, losses: Iterable[float], num_steps: int) -> Iterator[float]:
    """Pass the losses on, and show them: a live bar on a terminal, else about ten lines."""
    if not console.is_terminal:
        yield from _lines(console, title, losses, num_steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=num_steps, loss="")
        for loss in losses:
            progress.update(task, advance=1, loss=f"loss {loss:.4f}")
            yield loss


def _lines(console: Console, title: str, losses: Iterable[float], num_steps: int) -> Iterator[float]:
    every = max(1, num_steps // 10)
    for step, loss in enumerate(losses, 1):
        if step == 1 or step % every == 0 or step == num_steps:
            console.print(f"{title}: step {step}/{num_steps}, loss {loss:.4f}", highlight=False, soft_wrap=True)
        yield loss


def print_comparison(console: Console, record: RunRecord) -> None:
    """Print both losses of each step, their difference, and the verdict; a bad one is the error that the run then ends with."""
    table = Table("step", "scheduled", "reference", "difference", title="loss")
    for column in table.columns:
        column.justify = "right"
    every = -(-len(record.losses) // MAX_TABLE_ROWS)
    for step, (own, other) in enumerate(zip(record.losses, record.reference, strict=True), 1):
        if step % every == 0 or step in (1, record.largest_difference[1]):
            table.add_row(str(step), f"{own:.6f}", f"{other:.6f}", f"{abs(own - other):.1e}")
    console.print(table)
    if not record.is_refuted:
        console.print(verdict(record), highlight=False, soft_wrap=True)


def verdict(record: RunRecord) -> str:
    """Return the sentence that says whether the losses agree."""
    value, step = record.largest_difference
    largest = f"largest difference {value:.1e}, at step {step}"
    if record.settings.dropout:
        return f"{largest}; not judged, as with dropout the two runs draw different masks"
    word = "the same within" if record.is_within_tolerance else "NOT the same: above"
    return f"{largest}: {word} {record.settings.tolerance:.0e}"
