"""MLPs."""

from slapo_kernels.op import FusedMLP

__all__ = ["FusedMLP"]
