"""``slapo models``: the ready schedules that are installed."""

from __future__ import annotations

import inspect
import json
from typing import Any

from slapo_core import Registry, default_registry


def register(app: Any) -> None:
    import typer

    def models(as_json: bool = typer.Option(False, "--json", help="Print data instead of a table.")) -> None:
        """List the ready schedules: the key of each, what it is for, and which distribution it comes from."""
        registry = default_registry()
        rows = model_rows(registry)
        problems = [problem for record in registry.records for problem in [record.failure, *record.problems] if problem]
        if as_json:
            typer.echo(json.dumps({"models": rows, "problems": problems}, indent=2))
            return
        typer.echo(table_of(rows))
        for problem in problems:
            typer.secho(f"! {problem}", fg="red")

    app.command()(models)


def model_rows(registry: Registry) -> list[dict[str, str]]:
    """Return a row for each schedule that can be imported."""
    usable = registry.load_all("model")
    return [
        {
            "name": entry.name,
            "summary": (inspect.getdoc(usable[entry.name]) or "").partition("\n")[0].replace("``", ""),
            "distribution": entry.record.distribution if entry.record else entry.provider,
            "version": entry.record.version if entry.record else "",
        }
        for entry in registry.entries("model")
        if entry.name in usable
    ]


def table_of(rows: list[dict[str, str]]) -> str:
    columns = ("name", "summary", "distribution", "version")
    lines = [columns, *(tuple(row[column] for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
