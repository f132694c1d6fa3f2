"""Fast kernels for the modules of a Slapo model, and the modules made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

if TYPE_CHECKING:
    from .dispatch.dispatcher import choose, explain, kernel_names, reset, run
    from .dispatch.kernels import Implementation
    from .implementations import eager
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "dispatch.dispatcher": ["choose", "explain", "kernel_names", "reset", "run"],
            "dispatch.kernels": ["Implementation"],
            "implementations": ["eager"],
        },
    )

__all__ = ["Implementation", "choose", "eager", "explain", "kernel_names", "reset", "run"]
