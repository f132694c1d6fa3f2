"""The classic modules, where ``slapo-kernels`` is installed."""

try:
    from .attention import FlashAttention, FlashAttentionOp
    from .cross_entropy import ParallelCrossEntropy
    from .linear import FusedQKV, LinearWithAct, LinearWithDropout, LinearWithSeparateBias, LinearWithSyncFunc
    from .mlp import FusedMLP
    from .printing import Print
except ModuleNotFoundError as err:
    if err.name not in ("slapo_kernels", "slapo_kernels.op"):
        raise
    raise ImportError("slapo.op needs slapo_kernels; pip install slapo-kernels", name="slapo_kernels") from err

__all__ = [
    "FlashAttention",
    "FlashAttentionOp",
    "FusedMLP",
    "FusedQKV",
    "LinearWithAct",
    "LinearWithDropout",
    "LinearWithSeparateBias",
    "LinearWithSyncFunc",
    "ParallelCrossEntropy",
    "Print",
]
