"""Printing of what passes between modules."""

from slapo_kernels.op import Print

__all__ = ["Print"]
