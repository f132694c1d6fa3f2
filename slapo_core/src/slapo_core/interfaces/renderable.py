"""Base of what plugins show in ``print`` and in notebooks."""

from __future__ import annotations

from typing import Any


class Renderable:
    """An object that ``print`` and notebooks show as a plugin's ``slapo_render`` gives it, and else by its ``repr``."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._repr_html_(html=False) or repr(self)

    def _repr_html_(self, html: bool = True) -> str | None:
        """Ask the plugins of the object's own registry, if it has one, or those that are installed."""
        from ..registration.registry import default_registry  # noqa: PLC0415  the registry imports the interfaces

        registry: Any = getattr(self, "registry", None) or default_registry()
        return registry.hook.slapo_render(subject=self, html=html)  # type: ignore[no-any-return]
