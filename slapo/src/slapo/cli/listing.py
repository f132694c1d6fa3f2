"""``slapo primitives``, ``slapo dialects``, ``slapo plugins``: what is installed, by whom, and what did not load."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slapo_core import Entry, PluginRecord, Registry, default_registry

AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]


NAMES = ("primitives", "dialects", "plugins")
"""The commands; each says itself which plugins did not load."""


_WORD = 15
"""A column is wide enough for words of this many letters, where the terminal is."""
_PIPED = 200
"""Columns of a table that goes to no terminal."""


def primitives(as_json: AsJson = False) -> None:
    """List the primitives: what each does and which distribution it comes from."""
    registry = default_registry()
    usable = registry.load_all("primitive")
    rows = [_entry_row(entry, usable[entry.name]) for entry in registry.entries("primitive") if entry.name in usable]
    problems = [problem for record in registry.records for problem in _problems(record)]
    if as_json:
        _print_json({"primitives": rows, "problems": problems})
    else:
        _print_table(("name", "summary", "distribution", "version"), rows)
        _print_problems(problems)


def dialects(
    name: Annotated[str, typer.Argument(help="Say what this one's engine cannot do, and what to do instead.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the dialects: the engines a schedule can be built for, which are installed, and why one is not usable."""
    registry = default_registry()
    if name:
        registry.get("dialect", name)
    usable = registry.load_all("dialect")
    found = [_dialect(entry, usable.get(entry.name)) for entry in registry.entries("dialect") if name in ("", entry.name)]
    problems = [] if name else [problem for record in registry.records for problem in _problems(record)]
    if as_json:
        _print_json({"dialects": [{**row, **engine.data()} for row, engine in found], "problems": problems})
        return
    shown = [_with_engine(row, engine) for row, engine in found]
    _print_table(("name", "summary", "distribution", "engine", "tested", "usable"), shown)
    _print_problems(problems)
    for row, engine in found:
        if engine.note and engine.note not in problems:
            note = _plain_text(f"! {row['name']}: {engine.note}")
            Console().print(note, style="yellow" if engine.usable else "red", soft_wrap=True)
        if name and engine.limits:
            Console().print()
            _print_table(("cannot do", "instead"), [{"cannot do": asked, "instead": way} for asked, way in engine.limits])
        elif name:
            Console().print(_plain_text(f"{name} declares nothing that its engine cannot do"))


def plugins(as_json: AsJson = False) -> None:
    """List the plugins, what each provides, and why any of them did not load."""
    registry = default_registry()
    for kind in Registry.KINDS:
        registry.load_all(kind)  # what cannot be imported is then among the problems
    rows = [_plugin_row(registry, record) for record in registry.records]
    if as_json:
        _print_json({"plugins": rows})
    else:
        _print_table(("name", "distribution", "version", "state", "provides"), map(_flat, rows))
        _print_problems(problem for row in rows for problem in row["problems"])


def _entry_row(entry: Entry, target: type) -> dict[str, str]:
    summary = (inspect.getdoc(target) or "").partition("\n")[0].replace("``", "")
    distribution, version = (entry.record.distribution, entry.record.version) if entry.record else (entry.provider, "")
    return {"name": entry.name, "summary": summary, "distribution": distribution, "version": version}


def _dialect(entry: Entry, target: type | None) -> tuple[dict[str, str], EngineInfo]:
    """Return the row of a dialect and the information on its engine; ``target`` is None if it cannot be imported."""
    if target is not None:
        return _entry_row(entry, target), EngineInfo.of(target)
    problems = (entry.record.problems if entry.record else None) or ["its class cannot be imported"]
    return {**_entry_row(entry, object), "summary": ""}, EngineInfo(usable=False, note=problems[-1])


def _with_engine(row: Mapping[str, str], engine: EngineInfo) -> dict[str, str]:
    provider = f"{row['distribution']} {row['version']}".strip()
    usable = "yes" if engine.usable else "no"
    return {**row, "distribution": provider, "engine": engine.label, "tested": engine.tested, "usable": usable}


def _plugin_row(registry: Registry, record: PluginRecord) -> dict[str, Any]:
    provides = {
        hook.removeprefix("slapo_"): [entry.name for entry in registry.entries(kind) if entry.record is record]
        for kind, hook in Registry.KINDS.items()
    }
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
    provides = {**row["provides"], "hooks": [name for name in row["provides"]["hooks"] if name not in Registry.KINDS.values()]}
    lines = [f"{kind}: {', '.join(names)}" for kind, names in provides.items() if names]
    return {**{key: str(value) for key, value in row.items()}, "provides": "\n".join(lines)}


def _print_table(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    table, rows = Table(box=None, header_style="bold", pad_edge=False), list(rows)
    for column in columns:
        words = [word for row in rows for word in row[column].split()]
        table.add_column(column, overflow="fold", min_width=min(_WORD, max(map(len, words), default=0)))
    for row in rows:
        table.add_row(*(_plain_text(row[column]) for column in columns))
    Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED).print(table)


def _print_problems(problems: Iterable[str]) -> None:
    for problem in problems:
        Console().print(_plain_text(f"! {problem}"), style="red", soft_wrap=True)


def _plain_text(value: str) -> Text:
    """Text from a plugin as it is: no markup, and nothing that a terminal would obey."""
    return Text("".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in value))


def _print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))


@dataclass(frozen=True)
class EngineInfo:
    """The engine of a dialect, as it declares it by ``slapo_training.engines.dialect.EngineDialect``'s attributes.

    Reading it imports no engine.

    Args:
        engine: The engine's distribution; empty where the dialect names none.
        installed: Its version here; empty where it is not installed.
        tested: The version of it that the dialect was tested with.
        usable: Whether the dialect can be built for.
        note: Why it is not usable, or what to keep in mind; empty else.
        limits: What the engine cannot do, each with what to do instead.
    """

    engine: str = ""
    installed: str = ""
    tested: str = ""
    usable: bool = True
    note: str = ""
    limits: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, target: type) -> EngineInfo:
        """Read the information from a dialect's class and the metadata of installed distributions."""
        engine, tested = str(getattr(target, "distribution", "")), str(getattr(target, "tested", ""))
        limits = tuple((str(limit.asked), str(limit.instead)) for limit in getattr(target, "limits", ()))
        if not engine:
            return cls(limits=limits)
        try:
            installed = metadata.version(engine)
        except metadata.PackageNotFoundError:
            wanted = f"{engine}=={tested}" if tested else engine
            return cls(engine, "", tested, False, f"{engine} is not installed; pip install {wanted}", limits)
        note = f"tested with {engine} {tested}, and {installed} is installed" if tested not in ("", installed) else ""
        return cls(engine, installed, tested, True, note, limits)

    @property
    def label(self) -> str:
        """The engine and its version, in a table."""
        return f"{self.engine} {self.installed or 'not installed'}" if self.engine else ""

    def data(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "limits": [{"asked": asked, "instead": instead} for asked, instead in self.limits]}
