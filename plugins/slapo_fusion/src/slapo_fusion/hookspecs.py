"""The hook this plugin adds for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slapo_core import hookspec

if TYPE_CHECKING:
    from .compilers import Compiler


@hookspec
def slapo_compilers() -> Mapping[str, Compiler | str]:  # type: ignore[empty-body]
    """Compilers for ``fuse(compiler=...)``: a name to a function as ``slapo_fusion.compilers.Compiler`` describes it.

    For ``"module:NAME"`` the function is imported when a schedule first asks for it. If your plugin is of use without
    ``slapo-fusion`` too, mark the hook ``@hookimpl(optionalhook=True)``.

    Example:
        >>> @hookimpl
        ... def slapo_compilers():
        ...     return {"mine": "my_package.compilers:compile_region"}
    """
