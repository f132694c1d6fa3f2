"""Settings that a schedule file of ``slapo plan --save`` brings along, read without running it. Imports nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .settings import SettingsError

FLAGS = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "microbatches": "microbatches",
    "pipeline_schedule": "schedule_kind",
    "data_parallel": "data_parallel",
    "precision": "precision",
}
"""Name in a layout, in options of ``build`` or in a space to the flag that it sets."""

_MODEL = {name: name for name in ("model", "layers", "hidden", "heads", "seq", "batch")}
_STRINGS = ("model", "precision", "data_parallel", "schedule_kind")


def saved_settings(path: str) -> dict[str, Any]:
    """Return flags from the literal assignments ``layout``, ``build`` and ``model`` of a Python schedule file.

    A file without them, or that cannot be read, gives none: who runs it reports what is wrong with it.

    Raises:
        SettingsError: a value is not a number or not a string, as its flag is.
    """
    found: dict[str, Any] = {}
    for name, node in _assignments(path):
        if name not in ("layout", "build", "model"):
            continue
        try:
            given = ast.literal_eval(node.value)
        except ValueError:
            continue
        if isinstance(given, dict):
            flags = _MODEL if name == "model" else FLAGS
            values = {flags[key]: value for key, value in given.items() if key in flags}
            _check(values, f"--schedule {path}: line {node.lineno}: ", name)
            found |= values
    return found


def declares_space(path: str) -> bool:
    """Return True if a Python schedule file declares a space or its best, so that it must run for their values.

    A schedule with two arguments takes its space while it runs.
    """
    functions = {node.name: node for node in _statements(path) if isinstance(node, ast.FunctionDef)}
    takes_space = "schedule" in functions and len(functions["schedule"].args.args) > 1
    return takes_space or not {"space", "best"}.isdisjoint([*functions, *(name for name, _ in _assignments(path))])


def _check(values: dict[str, Any], place: str, name: str) -> None:
    for flag, value in values.items():
        kind = "string" if flag in _STRINGS else "number"
        if type(value) is not (str if kind == "string" else int):
            raise SettingsError(f"{place}{flag} of {name} is {value!r}; write a {kind}")


def _assignments(path: str) -> Iterator[tuple[str, ast.Assign]]:
    for node in _statements(path):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            yield target.id, node


def _statements(path: str) -> list[ast.stmt]:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []
