"""The self-contained page ``report.html``, with its tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from slapo_report import Limit, Line, cards, document, embed_json, line_chart, linear_axis, log_axis, step_axis, table
from slapo_torch.timeline import chrome_trace

from ..run_data.record import RunRecord
from .javascript import SCRIPT
from .module_tree import module_tree
from .stylesheet import STYLE
from .timeline import timeline

SMALLEST = 1e-8
"""Smaller differences are drawn at this value, as a logarithmic axis has no zero."""


def write_report(record: RunRecord, folder: Path) -> Path:
    """Write ``report.html`` and ``trace.json``, the last step's timeline, into ``folder``; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(page(record), encoding="utf-8")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(record.timeline)), encoding="utf-8")
    return path


def page(record: RunRecord) -> str:
    """Return the page of one run. Text from a model, a file or a plugin is escaped."""
    settings = record.settings
    title = f"{settings.model}: pp {settings.pp} x dp {settings.dp} x tp {settings.tp}"
    main = f"""<section><h2>Loss</h2><div class="charts">{_charts(record)}</div>
<details class="more"><summary>All values</summary>{loss_table(record)}</details></section>
<section><h2>Pipeline</h2>{timeline(record.timeline, settings.device)}</section>
<section><h2>Ranks</h2>{rank_table(record)}{stage_table(record)}</section>
<section><h2>Modules and schedule</h2>{module_tree(record)}</section>
<section class="two">
<div><h2>Settings</h2>{settings_table(record)}</div>
<div><h2>Versions</h2>{table(("package", "version"), list(record.versions.items()), "words")}</div>
</section>"""
    scripts = f"""<script type="application/json" id="run">{embed_json(asdict(record))}</script>
<script>{SCRIPT}</script>"""
    head = f"{_verdict(record)}\n{_cards(record)}"
    return document(title, "slapo train", head=head, main=main, style=STYLE, scripts=scripts)


def _verdict(record: RunRecord) -> str:
    if not record.reference:
        return '<p class="verdict">Not compared with the unmodified model; <code>--reference</code> does.</p>'
    value, step = record.largest_difference
    largest = f"largest difference of the loss {_nowrap(f'{value:.1e}')}, at step {step} of {len(record.losses)}"
    if record.settings.dropout:
        return f'<p class="verdict">Not judged: with dropout the two runs draw different masks; {largest}.</p>'
    limit = _nowrap(f"{record.settings.tolerance:.0e}".replace("e-0", "e-"))
    if record.is_within_tolerance:
        return f'<p class="verdict good"><b>Same as the unmodified model</b>, within {limit}: {largest}.</p>'
    return f'<p class="verdict bad"><b>Not the same as the unmodified model</b>: {largest}, above {limit}.</p>'


def _nowrap(number: str) -> str:
    return f'<span class="nowrap">{number}</span>'


def _cards(record: RunRecord) -> str:
    per_step = 1e3 * record.seconds / max(len(record.losses), 1)
    values = {
        "first loss": f"{record.losses[0]:.3f}" if record.losses else "-",
        "last loss": f"{record.losses[-1]:.3f}" if record.losses else "-",
        "parameters": f"{record.modules[0].params:,}",
        "ranks": str(len(record.ranks)),
        "stages": str(len(record.stage_paths)),
        "ms per step": f"{per_step:.0f}",
    }
    note = (
        f"ms per step: the mean over all steps of the scheduled run, {len(record.losses)}, the slower first one among them; "
        "without building the model and without the reference."
    )
    return f'{cards(values)}<p class="note">{note}</p>'


def _charts(record: RunRecord) -> str:
    if not record.losses:
        return '<p class="empty">No step was taken.</p>'
    steps = step_axis(len(record.losses))
    lines = [Line("scheduled", "own", record.losses)]
    if not record.reference:
        return line_chart("Loss", lines, steps, linear_axis(record.losses), y_label="nats per byte")
    lines.insert(0, Line("reference", "other", record.reference))
    both = linear_axis([*record.losses, *record.reference])
    limit = Limit("tolerance", record.settings.tolerance)
    gaps = log_axis([*record.differences, limit.value], SMALLEST)
    return line_chart("Loss of both runs", lines, steps, both, y_label="nats per byte") + line_chart(
        "Distance of the two losses",
        [Line("difference", "gap", record.differences)],
        steps,
        gaps,
        y_label="absolute difference, log scale; zero lies at the bottom",
        limit=limit,
    )


def rank_table(record: RunRecord) -> str:
    """Table of the stages and the number of parameters of each rank."""
    total = record.modules[0].params
    rows = []
    for each in record.ranks:
        place = (each.rank, each.pp, each.dp, each.tp, ", ".join(map(str, each.stages)))
        rows.append((*place, f"{each.params:,}", f"{100 * each.params / total:.1f}%"))
    return table(("rank", "pp", "dp", "tp", "stage", "parameters", "of the model"), rows)


def stage_table(record: RunRecord) -> str:
    """Table of the modules of each stage; empty for a model without cuts."""
    if len(record.stage_paths) < 2:
        return ""
    rows = [(index, ", ".join(paths)) for index, paths in enumerate(record.stage_paths)]
    modules = table(("stage", "modules"), rows, "words")
    return f'<details class="more"><summary>Modules of each stage</summary>{modules}</details>'


def loss_table(record: RunRecord) -> str:
    """Table of all losses."""
    if record.reference:
        head: tuple[str, ...] = ("step", "scheduled", "reference", "difference")
        lines = zip(record.losses, record.reference, record.differences, strict=True)
        rows = [(step, f"{own:.6f}", f"{other:.6f}", f"{gap:.1e}") for step, (own, other, gap) in enumerate(lines, 1)]
        return table(head, rows)
    return table(("step", "loss"), [(step, f"{loss:.6f}") for step, loss in enumerate(record.losses, 1)])


def settings_table(record: RunRecord) -> str:
    """Table of the run's settings."""
    schedule = record.settings.schedule or "default, from the model's structure"
    shown = asdict(record.settings) | {"data": record.source, "schedule": schedule}
    rows = [(key.replace("_", " "), _yes_no(value)) for key, value in shown.items() if value != ""]
    return table(("setting", "value"), rows, "words")


def _yes_no(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
