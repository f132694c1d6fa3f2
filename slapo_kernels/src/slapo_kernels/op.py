"""The classic modules, ``slapo.op``."""

from .layers.attention import FlashAttention, FlashAttentionOp
from .layers.fused import FusedMLP, FusedQKV
from .layers.linear import LinearWithAct, LinearWithDropout, LinearWithSeparateBias, LinearWithSyncFunc
from .layers.printing import Print

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
