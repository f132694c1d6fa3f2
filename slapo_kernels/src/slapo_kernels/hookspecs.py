"""Hook specification that slapo-kernels adds for other plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slapo_core import hookspec

if TYPE_CHECKING:
    from .dispatch.kernels import Implementation


@hookspec
def slapo_kernels() -> Mapping[str, Mapping[str, Implementation | str]]:  # type: ignore[empty-body]
    """Return implementations of kernels: name of the kernel to name of the implementation to the implementation.

    An implementation is a function with the arguments and gradients of the kernel's eager implementation in
    ``slapo_kernels.eager``, given as ``"module:NAME"`` and imported on its first call.
    ``slapo_kernels.Implementation`` states its requirements. It comes after those of ``slapo-kernels``, so it has to be forced,
    unless it is ``preferred``. If your plugin also works without ``slapo-kernels``, mark the hook
    ``@hookimpl(optionalhook=True)``.

    Example:
        >>> @hookimpl
        ... def slapo_kernels():
        ...     fast = Implementation("my_package.norms:rms_norm", devices=("cuda",), packages=("my-package",), preferred=True)
        ...     return {"rms_norm": {"mine": fast}}
    """
