"""Hook implementations of slapo-tune."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl


@hookimpl
def slapo_commands(app: Any) -> None:
    """``slapo tune``."""
    from .command import register  # noqa: PLC0415  needs what only the command line has

    register(app)
