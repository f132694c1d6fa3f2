"""Kernels of torch itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F

from . import eager
from .attention_masks import check_mask, has_fully_masked_query
from .cross_entropy_labels import fused_cross_entropy
from .eager import check_cast

Tensor = torch.Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """``F.scaled_dot_product_attention``, which chooses between the flash, memory-efficient and cuDNN kernels.

    Their gradients are wrong if an additive mask hides all keys from a query; for such a mask the eager kernel runs.
    """
    check_mask(mask, **options)
    if has_fully_masked_query(mask):
        return eager.attention(q, k, v, mask, **options)
    return F.scaled_dot_product_attention(q, k, v, mask, **options, enable_gqa=q.shape[1] != k.shape[1])


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, cast: str = "input") -> Tensor:
    """``F.rms_norm``, which rounds after the weight; to round before it, the weight is multiplied afterwards."""
    check_cast(cast)
    shape = weight.shape
    if cast == "weight":
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), shape, offset + weight.to(wide) if offset else weight.to(wide), eps).to(x.dtype)
    scale = offset + weight if offset else weight
    if x.dtype is scale.dtype and x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, shape, scale, eps)
    return scale * F.rms_norm(x, shape, None, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """``F.layer_norm``."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """``F.linear_cross_entropy`` in chunks of rows; it computes gradients in the forward, and refuses a second backward."""
    return fused_cross_entropy(_loss, hidden, weight, labels, **options)


def _loss(rows: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    options = LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling())
    return F.linear_cross_entropy(
        rows, weight, labels, linear_bias=bias, reduction=reduction, ignore_index=ignore_index, options=options
    )


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """``F.embedding``."""
    return F.embedding(ids, weight, padding_idx)
