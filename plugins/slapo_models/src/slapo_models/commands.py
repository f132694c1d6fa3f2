"""``slapo models``: the ready schedules that are installed, the families they serve, and published sizes."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from typing import Any

from slapo_core import Registry, UnknownNameError, default_registry

from .apply import AUTO, schedule_names
from .families import TESTED_FAMILIES
from .published import published_sizes


def register(app: Any) -> None:
    import typer

    def models(
        name: str = typer.Argument("", help="A published size, such as llama-3-70b, or a family: print its sizes."),
        as_json: bool = typer.Option(False, "--json", help="Print data instead of a table."),
    ) -> None:
        """List the ready schedules, and the families that are tested under auto; or print the published sizes of one."""
        if name:
            found = sizes_of(name)
            typer.echo(json.dumps({"sizes": found}, indent=2) if as_json else "\n\n".join(map(_text_of_size, found)))
            return
        registry = default_registry()
        rows, families = model_rows(registry), family_rows(registry)
        problems = [problem for record in registry.records for problem in [record.failure, *record.problems] if problem]
        if as_json:
            typer.echo(json.dumps({"models": rows, "families": families, "problems": problems}, indent=2))
            return
        typer.echo(table_of(rows, ("name", "summary", "distribution", "version")))
        typer.echo("\n" + table_of(families, ("model_type", "schedule", "published sizes")))
        for problem in problems:
            typer.secho(f"! {problem}", fg="red")

    app.command()(models)


def family_rows(registry: Registry) -> list[dict[str, str]]:
    """Return a row for each family: its ``model_type``, the schedule that ``"auto"`` takes, and its published sizes."""
    names: dict[str, list[str]] = {model_type: [] for model_type in TESTED_FAMILIES}
    for size in published_sizes().values():
        names.setdefault(size.model_type, []).append(size.name)
    keys = schedule_names(registry)
    return [
        {"model_type": each, "schedule": each if each in keys else AUTO, "published sizes": ", ".join(names[each])}
        for each in sorted(names)
    ]


def sizes_of(name: str) -> list[dict[str, Any]]:
    """Return the published size of this name, or those of this family.

    Raises:
        UnknownNameError: there is neither.
    """
    sizes = published_sizes()
    found = [asdict(size) for size in sizes.values() if name in (size.name, size.model_type)]
    if not found:
        raise UnknownNameError.of("published size", name, {*sizes, *(size.model_type for size in sizes.values())})
    return found


def _text_of_size(size: dict[str, Any]) -> str:
    about = "about " if size["rounded"] else ""
    lines = [f"{size['name']}: {about}{size['parameters']:,} parameters, {size['model_type']}, {size['source']}"]
    return "\n".join(lines + [f"  {name}: {value}" for name, value in size["config"].items()])


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


def table_of(rows: list[dict[str, str]], columns: tuple[str, ...]) -> str:
    lines = [columns, *(tuple(row[column] for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
