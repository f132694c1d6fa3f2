"""What passes between modules, printed."""

from slapo_kernels.op import Print

__all__ = ["Print"]
