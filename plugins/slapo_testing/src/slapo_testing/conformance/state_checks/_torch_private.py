"""Private names of torch, behind plain functions. ``test_conformance_circumstances.py`` tells when they move."""

from __future__ import annotations

from typing import Any

from torch import nn


def hooks_of_all_modules() -> dict[str, dict[Any, Any]]:
    """The tables, by name, of the hooks that fire for every module."""
    return {
        name: table
        for name, table in vars(nn.modules.module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    }
