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
_STRINGS = ("model", "precision", "data_parallel", "schedule_kind", "target")


def saved_settings(path: str) -> dict[str, Any]:
    """Return flags from the literal assignments ``layout``, ``build``, ``target`` and ``model`` of a Python schedule file.

    A file without them, or that cannot be read, gives none: who runs it reports what is wrong with it.

    Raises:
        SettingsError: a value is not a number or not a string, as its flag is.
    """
    found: dict[str, Any] = {}
    for name, given, line in _literals(path):
        flags = _MODEL if name == "model" else FLAGS
        values = {flags[key]: value for key, value in given.items() if key in flags} if isinstance(given, dict) else {}
        values |= {"target": given} if name == "target" else {}
        _check(values, f"--schedule {path}: line {line}: ", name)
        found |= values
    return found


def other_build_options(path: str) -> dict[str, Any]:
    """Return the options of ``build`` of a Python schedule file that are no flags, such as those of its engine's stages."""
    named = [given for name, given, _ in _literals(path) if name == "build" and isinstance(given, dict)]
    return {key: value for given in named for key, value in given.items() if key not in FLAGS}


def _literals(path: str) -> Iterator[tuple[str, Any, int]]:
    """Yield name, value and line of the assignments that say how a schedule is built."""
    for name, node in _assignments(path):
        if name in ("layout", "build", "model", "target"):
            try:
                yield name, ast.literal_eval(node.value), node.lineno
            except ValueError:
                continue


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
