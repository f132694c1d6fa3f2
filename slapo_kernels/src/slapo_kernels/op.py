"""The classic modules, ``slapo.op``."""

from .attention import FlashAttention, FlashAttentionOp
from .fused import FusedMLP, FusedQKV
from .linear import LinearWithAct, LinearWithDropout, LinearWithSeparateBias, LinearWithSyncFunc
from .printing import Print

__all__ = [
    "FlashAttention",
    "FlashAttentionOp",
    "FusedMLP",
    "FusedQKV",
    "LinearWithAct",
    "LinearWithDropout",
    "LinearWithSeparateBias",
    "LinearWithSyncFunc",
    "Print",
]
