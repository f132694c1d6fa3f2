"""The tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape

from ..run_data.record import RunRecord


def rank_table(record: RunRecord) -> str:
    """Table of the stages and the number of parameters of each rank."""
    total = record.modules[0].params
    rows = [
        (
            rank.rank,
            rank.pp,
            rank.dp,
            rank.tp,
            ", ".join(map(str, rank.stages)),
            f"{rank.params:,}",
            f"{100 * rank.params / total:.1f}%",
        )
        for rank in record.ranks
    ]
    return _table(("rank", "pp", "dp", "tp", "stage", "parameters", "of the model"), rows)


def stage_table(record: RunRecord) -> str:
    """Table of the modules of each stage; empty for a model without cuts."""
    if len(record.stage_paths) < 2:
        return ""
    rows = [(index, ", ".join(paths)) for index, paths in enumerate(record.stage_paths)]
    return (
        f'<details class="more"><summary>Modules of each stage</summary>{_table(("stage", "modules"), rows, "words")}</details>'
    )


def loss_table(record: RunRecord) -> str:
    """Table of all losses."""
    if record.reference:
        head: tuple[str, ...] = ("step", "scheduled", "reference", "difference")
        lines = zip(record.losses, record.reference, record.differences, strict=True)
        rows = [(step, f"{own:.6f}", f"{other:.6f}", f"{gap:.1e}") for step, (own, other, gap) in enumerate(lines, 1)]
        return _table(head, rows)
    return _table(("step", "loss"), [(step, f"{loss:.6f}") for step, loss in enumerate(record.losses, 1)])


def settings_table(record: RunRecord) -> str:
    """Table of the run's settings."""
    shown = asdict(record.settings) | {
        "data": record.source,
        "schedule": record.settings.schedule or "default, from the model's structure",
    }
    return _table(
        ("setting", "value"), [(key.replace("_", " "), _yes_no(value)) for key, value in shown.items() if value != ""], "words"
    )


def version_table(record: RunRecord) -> str:
    """Table of the installed versions."""
    return _table(("package", "version"), list(record.versions.items()), "words")


def _yes_no(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], style: str = "numbers") -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{style}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
