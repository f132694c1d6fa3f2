"""The classic modules, where ``slapo-kernels`` is installed."""

from slapo_sharding.cross_entropy import ParallelCrossEntropy

try:
    from slapo_kernels.op import (
        FlashAttention,
        FlashAttentionOp,
        FusedMLP,
        FusedQKV,
        LinearWithAct,
        LinearWithDropout,
        LinearWithSeparateBias,
        LinearWithSyncFunc,
        Print,
    )
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
