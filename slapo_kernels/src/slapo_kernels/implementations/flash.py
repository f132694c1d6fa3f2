"""Attention by the package flash-attn."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``flash_attn_func``; its dropout draws other masks than torch's from the same seed."""
    from flash_attn import flash_attn_func

    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out: Tensor = flash_attn_func(q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=is_causal)
    return out.transpose(1, 2)


def refuses(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, **options: Any
) -> str | None:
    """Return the reason why flash-attn cannot compute the call, or computes something else than torch; or None."""
    if mask is not None:
        return "takes no mask"
    if is_causal and q.shape[2] != k.shape[2]:
        return f"counts causality from the last key, and there are {q.shape[2]} queries for {k.shape[2]} keys"
    if q.shape[-1] > 256 or v.shape[-1] != q.shape[-1]:
        return f"takes heads of up to 256 numbers, all alike, not of {q.shape[-1]} and {v.shape[-1]}"
    return None
