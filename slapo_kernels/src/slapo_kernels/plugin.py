"""Hook implementations of slapo-kernels."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl

from . import hookspecs


@hookimpl
def slapo_primitives() -> dict[str, str]:
    return {"use_kernels": "slapo_kernels.use_kernels:UseKernelsPrimitive"}


@hookimpl
def slapo_add_hookspecs(manager: Any) -> None:
    """``slapo_kernels``."""
    manager.add_hookspecs(hookspecs)


@hookimpl
def slapo_commands(app: Any) -> None:
    """``slapo kernels``."""
    from .commands import register  # noqa: PLC0415  needs what only the command line has

    register(app)
