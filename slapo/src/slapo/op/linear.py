"""Linear layers."""

from slapo_kernels.op import FusedQKV, LinearWithAct, LinearWithDropout, LinearWithSeparateBias, LinearWithSyncFunc

__all__ = ["FusedQKV", "LinearWithAct", "LinearWithDropout", "LinearWithSeparateBias", "LinearWithSyncFunc"]
