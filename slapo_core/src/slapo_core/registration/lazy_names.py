"""Public names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports its public names when they are first used (PEP 562).

    Loading a plugin imports its package, and listing primitives loads all plugins. A package that imports nothing keeps that
    cheap. Under ``TYPE_CHECKING`` the same names are imported as usual, for type checkers.

    Args:
        package: ``__name__`` of the package.
        modules: Names by the submodule that defines them, relative to the package.

    Example:
        In the ``__init__.py`` of a plugin::

            if TYPE_CHECKING:
                from .rotary import rotate, rotate_back
            else:
                __getattr__ = lazy_names(__name__, {"rotary": ["rotate", "rotate_back"]})

        >>> lazy_names("torch.nn", {"functional": ["gelu"]})("gelu") is nn.functional.gelu
        True
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get_attribute
