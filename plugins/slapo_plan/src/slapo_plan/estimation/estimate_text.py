"""An estimate as text: a table of memory, operations, step time and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .link_totals import CollectiveTotal, LinkTotal

if TYPE_CHECKING:
    from .result import Estimate, RankEstimate


def estimate_lines(found: Estimate) -> Iterator[str]:
    """Yield the lines that ``print`` shows."""
    layout = " ".join(f"{axis}={size}" for axis, size in found.layout.items() if size > 1) or "one rank"
    yield f"{found.model}, {layout}, target {found.target!r}"
    if found.settings:
        yield ", ".join(f"{name}={value!r}" for name, value in found.settings.items())
    for problem in found.problems:
        yield f"cannot run: {problem}"
    if found.ranks:
        yield from _memory_table(found.ranks)
        model = f"{found.model_flops / 1e12:.4g} without recomputation"
        yield f"{found.flops / 1e12:.4g} TFLOP per step over all ranks, {model}"
    if found.time is not None and found.hardware is not None:
        limit = found.hardware.usable_bytes
        fits = "fits" if found.peak <= limit else "does not fit"
        yield f"{found.hardware.name}: {fits}, {_size(found.peak)} of {_size(limit)}"
        parts = f"bubble {found.time.bubble:.1%}, MFU {found.mfu:.1%}"
        yield f"step of {found.time.seconds:.4g} s, {parts}, {found.time.communicating:.3g} s of exposed communication"
    yield from map(_collective_line, found.collectives)
    yield from map(_link_line, found.links)
    for note in found.notes:
        yield f"note: {note}"


def _collective_line(each: CollectiveTotal) -> str:
    link = "" if each.link is None else f", {each.link}"
    return f"pp rank {each.rank}: {each.count} x {each.kind} over {each.axis} of {_size(each.nbytes)}{link}"


def _link_line(each: LinkTotal) -> str:
    where = each.link if each.link.startswith(("within", "between")) else f"over {each.link}"
    return f"pp rank {each.rank} sends {_size(each.nbytes)} {where} in {each.count} collectives and messages"


def _memory_table(ranks: Sequence[RankEstimate]) -> Iterator[str]:
    kinds = [kind for kind in ranks[0].memory.kinds if any(each.memory.kinds[kind] for each in ranks)]
    rows = [["pp rank", "stages", *kinds, "peak", "at"]]
    for each in ranks:
        sizes = [_size(each.memory.kinds[kind]) for kind in kinds]
        rows.append([str(each.rank), ",".join(map(str, each.stages)), *sizes, _size(each.memory.peak), each.memory.when])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
