"""The hook this plugin adds for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slapo_core import hookspec

if TYPE_CHECKING:
    from .dispatch.implementation import Implementation


@hookspec
def slapo_kernels() -> Mapping[str, Mapping[str, Implementation | str]]:  # type: ignore[empty-body]
    """Implementations of kernels: the kernel's name to the implementation's to what it is.

    A function with the arguments of the kernel's eager implementation (``slapo_kernels.implementations.eager``), gradients
    included, as ``"module:NAME"``, imported when first called. Say where it works with ``slapo_kernels.Implementation``. They
    come after those of ``slapo-kernels``, so they have to be forced, unless they are ``preferred``. If your plugin is of use
    without ``slapo-kernels`` too, mark the hook ``@hookimpl(optionalhook=True)``.

    Example:
        >>> @hookimpl
        ... def slapo_kernels():
        ...     fast = Implementation("my_package.norms:rms_norm", devices=("cuda",), packages=("my-package",), preferred=True)
        ...     return {"rms_norm": {"mine": fast}}
    """
