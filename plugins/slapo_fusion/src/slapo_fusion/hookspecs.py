"""Hook specification that slapo-fusion adds for other plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slapo_core import hookspec

if TYPE_CHECKING:
    from .compilers import Compiler


@hookspec
def slapo_compilers() -> Mapping[str, Compiler | str]:  # type: ignore[empty-body]
    """Return compilers for ``fuse(compiler=...)``: name to a function like ``slapo_fusion.compilers.Compiler``.

    A function given as ``"module:NAME"`` is imported on first use. If your plugin also works without ``slapo-fusion``, mark
    the hook ``@hookimpl(optionalhook=True)``.

    Example:
        >>> @hookimpl
        ... def slapo_compilers():
        ...     return {"mine": "my_package.compilers:compile_region"}
    """
