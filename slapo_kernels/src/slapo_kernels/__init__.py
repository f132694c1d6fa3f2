"""Fast kernels for the modules of a Slapo model, and the modules made of them."""

from __future__ import annotations

from .implementation import Implementation
from .registry import choose, explain, kernel_names, reset, run

__all__ = ["Implementation", "choose", "explain", "kernel_names", "reset", "run"]
