"""Base of what plugins show in ``print`` and in notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Renderable:
    """An object that ``print`` and notebooks show as a plugin's ``slapo_render`` gives it, and else by its ``repr``."""

    __slots__ = ()
    _default_registry: ClassVar[Callable[[], Any]]  # set by the registry's module, which imports this one

    def __str__(self) -> str:
        return self._repr_html_(html=False) or repr(self)

    def _repr_html_(self, html: bool = True) -> str | None:
        """Ask the plugins of the object's own registry, if it has one, or those that are installed."""
        registry: Any = getattr(self, "registry", None) or type(self)._default_registry()
        return registry.hook.slapo_render(subject=self, html=html)  # type: ignore[no-any-return]
