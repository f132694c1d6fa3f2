"""Base class of objects that plugins render for ``print`` and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Renderable:
    """Object that a plugin's ``slapo_render`` shows in ``print`` and in notebooks; its ``repr`` if no plugin does."""

    __slots__ = ()
    _default_registry: ClassVar[Callable[[], Any]]  # set by the registry's module, which imports this one

    def __str__(self) -> str:
        return self._repr_html_(html=False) or repr(self)

    def _repr_html_(self, html: bool = True) -> str | None:
        """Return the result of the plugins of the object's own registry, if it has one, else of the installed ones."""
        registry: Any = getattr(self, "registry", None) or type(self)._default_registry()
        return registry.hook.slapo_render(subject=self, html=html)  # type: ignore[no-any-return]
