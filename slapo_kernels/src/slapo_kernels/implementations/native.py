"""Kernels of torch itself, and the casts and the mean over no label that every fused cross entropy of a head needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from . import eager
from ._torch_private import is_transformed
from .eager import check_cast, check_labels, check_mask

Tensor = torch.Tensor
_HIDDEN = -1e3
"""A key is hidden if less than this is added to its score."""
_known: Any = WeakTensorKeyDictionary()
"""Mask to its version counter, and whether it hides all keys from some query."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """``F.scaled_dot_product_attention``, which chooses between the flash, memory-efficient and cuDNN kernels.

    Their gradients are wrong if an additive mask hides all keys from a query; for such a mask the eager kernel runs.
    """
    check_mask(mask, **options)
    if has_fully_masked_query(mask):
        return eager.attention(q, k, v, mask, **options)
    return F.scaled_dot_product_attention(q, k, v, mask, **options, enable_gqa=q.shape[1] != k.shape[1])


def has_fully_masked_query(mask: torch.Tensor | None) -> bool:
    """Return whether an additive mask hides all keys from some query; True if the mask's values cannot be read.

    Fused kernels save one log-sum-exp per query. It loses the sum if the added value is huge, and gradients are wrong.
    Reading the mask synchronises with its GPU, once per mask.
    """
    if mask is None or not mask.is_floating_point():
        return False
    if torch.compiler.is_compiling() or is_transformed() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    version = None if mask.is_inference() else mask._version
    known: tuple[int | None, bool] | None = _known.get(mask)
    if known is None or known[0] != version:
        known = version, bool(mask.numel() and (mask.detach().amax(-1) < _HIDDEN).any())
        _known[mask] = known
    return known[1]


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


def fused_cross_entropy(
    loss_of: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the kernel ``linear_cross_entropy`` by ``loss_of``, in at least float32.

    Args:
        loss_of: Function of ``[rows, size]``, weight, one label per row, bias, ``ignore_index`` and ``reduction``.
        hidden: This and the others: as the eager implementation.
    """
    check_labels(hidden, labels)
    rows, targets, counts = hidden.flatten(0, -2), labels.flatten(), None
    if torch.is_autocast_enabled(rows.device.type):  # it casts inputs of matrix products, but does not know these functions
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if reduction == "mean":
        targets, counts = _with_counted_label(targets, ignore_index, len(weight))
    loss = loss_of(rows, weight, targets, bias, ignore_index, reduction)
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if counts is not None:
        loss = torch.where(counts, loss, float("nan"))
    return loss.view(labels.shape) if reduction == "none" else loss


def _with_counted_label(labels: torch.Tensor, ignore_index: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return labels with at least one that counts, and whether one counted before; None if no label can count.

    ``F.cross_entropy`` of ignored labels alone has a mean of NaN and gradients of 0; other kernels divide 0 by 0.
    """
    if num_classes < 2 or not len(labels):
        return labels, None
    counts = (labels != ignore_index).any()
    first = torch.where(counts, labels[:1], 1 if ignore_index == 0 else 0)
    return torch.cat([first, labels[1:]]), counts


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """``F.embedding``."""
    return F.embedding(ids, weight, padding_idx)
