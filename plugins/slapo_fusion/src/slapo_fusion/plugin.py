"""Hook implementations of slapo-fusion."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl

from . import hookspecs


@hookimpl
def slapo_primitives() -> dict[str, str]:
    return {name: f"slapo_fusion.{name}:{name.title()}Primitive" for name in ("compile", "decompose", "fuse")}


@hookimpl
def slapo_add_hookspecs(manager: Any) -> None:
    """``slapo_compilers``."""
    manager.add_hookspecs(hookspecs)


@hookimpl(trylast=True)
def slapo_compilers() -> dict[str, str]:
    names = ("inductor", "inductor_fast_dropout", "one_matmul", "torchscript")
    return {name: f"slapo_fusion.compilers:{name}" for name in names}
