"""Base of what plugins show in ``print`` and in notebooks."""

from __future__ import annotations


class Renderable:
    """An object that ``print`` and notebooks show as a plugin's ``slapo_render`` gives it, and else by its ``repr``."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._rendered(False) or self._plain_text()

    def _repr_html_(self) -> str | None:
        return self._rendered(True)

    def _plain_text(self) -> str:
        return repr(self)

    def _rendered(self, html: bool) -> str | None:
        from ..registration.registry import Registry, default_registry  # noqa: PLC0415  the registry imports the interfaces

        registry = getattr(self, "registry", None)
        found = registry if isinstance(registry, Registry) else default_registry()
        return found.hook.slapo_render(subject=self, html=html)  # type: ignore[no-any-return]
