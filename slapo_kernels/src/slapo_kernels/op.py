"""The classic modules, ``slapo.op``."""

from .attention import FlashAttention
from .fused import FusedMLP, FusedQKV
from .linear import LinearWithAct, LinearWithDropout, LinearWithSeparateBias
from .printing import Print

__all__ = [
    "FlashAttention",
    "FusedMLP",
    "FusedQKV",
    "LinearWithAct",
    "LinearWithDropout",
    "LinearWithSeparateBias",
    "Print",
]
