"""Settings that a schedule file of ``slapo plan --save`` brings along, read without running it. Imports nothing heavy."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from .settings import SettingsError

_LAYOUT = {"tp": "tp", "pp": "pp", "dp": "dp"}
_BUILD = {
    "microbatches": "microbatches",
    "precision": "precision",
    "data_parallel": "data_parallel",
    "pipeline_schedule": "schedule_kind",
}
_MODEL = {name: name for name in ("model", "layers", "hidden", "heads", "seq", "batch")}
_NAMES = {"layout": _LAYOUT, "build": _BUILD, "model": _MODEL}
"""Assignment of a file to its keys, each with the field of ``Settings``."""


def saved_settings(path: str) -> dict[str, Any]:
    """Return fields of ``Settings`` from the assignments ``layout``, ``build`` and ``model`` of a Python schedule file.

    A file without them, of another kind, or that cannot be read gives none: ``load_schedule`` reports what is wrong with it.

    Raises:
        SettingsError: an assignment is not a literal dictionary, or a value is neither a number nor a string.
    """
    if not path.endswith(".py"):
        return {}
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and target.id in _NAMES:
            found |= _fields(path, node, target.id)
    return found


def _fields(path: str, node: ast.Assign, name: str) -> dict[str, Any]:
    try:
        given = ast.literal_eval(node.value)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise SettingsError(
            f"--schedule {path}: line {node.lineno}: {name} is not a literal dictionary; write one, or remove it"
        )
    found = {field: given[key] for key, field in _NAMES[name].items() if key in given}
    for field, value in found.items():
        expected = str if field in ("model", "precision", "data_parallel", "schedule_kind") else int
        if type(value) is not expected:
            kind = "string" if expected is str else "number"
            raise SettingsError(f"--schedule {path}: line {node.lineno}: {field} of {name} is {value!r}; write a {kind}")
    return found
