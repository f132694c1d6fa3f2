"""``slapo primitives``, ``slapo dialects``, ``slapo plugins``: what is installed, by whom, and what did not load."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slapo_core.entries import HOOKS, Entry
from slapo_core.plugins import PluginRecord
from slapo_core.registry import Registry, default_registry

AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]


NAMES = ("primitives", "dialects", "plugins")
"""The commands; each says itself which plugins did not load."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(primitives)
    app.command()(dialects)
    app.command()(plugins)


def primitives(as_json: AsJson = False) -> None:
    """List the primitives: what each does and which distribution it comes from."""
    _list_entries("primitive", as_json)


def dialects(as_json: AsJson = False) -> None:
    """List the dialects: the engines a schedule can be built for."""
    _list_entries("dialect", as_json)


def plugins(as_json: AsJson = False) -> None:
    """List the plugins, what each provides, and why any of them did not load."""
    registry = default_registry()
    for kind in HOOKS:
        registry.importable(kind)  # what cannot be imported is then among the problems
    rows = [_plugin_row(registry, record) for record in registry.records]
    if as_json:
        _print_json({"plugins": rows})
    else:
        _print_table(("name", "distribution", "version", "state", "provides"), map(_flat, rows))
        _print_problems(problem for row in rows for problem in row["problems"])


def _list_entries(kind: str, as_json: bool) -> None:
    registry = default_registry()
    usable = registry.importable(kind)
    rows = [_entry_row(entry, usable[entry.name]) for entry in registry.entries(kind) if entry.name in usable]
    problems = [problem for record in registry.records for problem in _problems(record)]
    if as_json:
        _print_json({f"{kind}s": rows, "problems": problems})
    else:
        _print_table(("name", "summary", "distribution", "version"), rows)
        _print_problems(problems)


def _entry_row(entry: Entry, target: type) -> dict[str, str]:
    summary = (inspect.getdoc(target) or "").partition("\n")[0].replace("``", "")
    distribution, version = (entry.record.distribution, entry.record.version) if entry.record else (entry.provider, "")
    return {"name": entry.name, "summary": summary, "distribution": distribution, "version": version}


def _plugin_row(registry: Registry, record: PluginRecord) -> dict[str, Any]:
    provides = {f"{kind}s": [entry.name for entry in registry.entries(kind) if entry.record is record] for kind in HOOKS}
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "state": "disabled" if record.disabled else "loaded" if record.loaded else "failed",
        "provides": {**provides, "hooks": registry.hooks_of(record)},
        "problems": _problems(record),
    }


def _problems(record: PluginRecord) -> list[str]:
    return [record.failure] if record.failure else list(record.problems)


def _flat(row: Mapping[str, Any]) -> dict[str, str]:
    """One line per kind of thing the plugin provides; the registration hooks are not news."""
    provides = {**row["provides"], "hooks": [name for name in row["provides"]["hooks"] if name not in HOOKS.values()]}
    lines = [f"{kind}: {', '.join(names)}" for kind, names in provides.items() if names]
    return {**{key: str(value) for key, value in row.items()}, "provides": "\n".join(lines)}


def _print_table(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_plain(row[column]) for column in columns))
    Console().print(table)


def _print_problems(problems: Iterable[str]) -> None:
    for problem in problems:
        Console().print(_plain(f"! {problem}"), style="red", soft_wrap=True)


def _plain(value: str) -> Text:
    """Text from a plugin as it is: no markup, and nothing that a terminal would obey."""
    return Text("".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in value))


def _print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))
