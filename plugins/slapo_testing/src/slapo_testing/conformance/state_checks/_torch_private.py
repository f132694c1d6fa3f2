"""Private names of torch, behind plain functions. ``test_conformance_process_state.py`` fails when torch moves one."""

from __future__ import annotations

from typing import Any

from torch import nn


def hooks_of_all_modules() -> dict[str, dict[Any, Any]]:
    """Return the tables of the hooks that run for every module, by name."""
    return {
        name: table
        for name, table in vars(nn.modules.module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    }
