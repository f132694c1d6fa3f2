"""Attention."""

from slapo_kernels.op import FlashAttention, FlashAttentionOp

__all__ = ["FlashAttention", "FlashAttentionOp"]
