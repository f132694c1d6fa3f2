"""Fast kernels for the modules of a Slapo model, and the modules made of them."""

from __future__ import annotations

from .dispatch.dispatcher import choose, explain, kernel_names, reset, run
from .dispatch.kernels import Implementation
from .implementations import eager

__all__ = ["Implementation", "choose", "eager", "explain", "kernel_names", "reset", "run"]
