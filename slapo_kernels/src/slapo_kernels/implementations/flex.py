"""Attention as torch's FlexAttention compiles it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .eager import check_mask
from .native import has_fully_masked_query

Tensor = torch.Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Call the compiled FlexAttention; it skips blocks of keys that are hidden by causality."""
    return attend(_compiled_attention(), q, k, v, mask, **options)


def refuses(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, dropout_p: float = 0.0, **options: Any
) -> str | None:
    """Return the reason why FlexAttention cannot compute the call, or None."""
    if dropout_p:
        return f"has no dropout, and dropout_p is {dropout_p}"
    if mask is not None and mask.requires_grad:
        return "gives a mask no gradient"
    return "has wrong gradients where an added mask hides all keys from a query" if has_fully_masked_query(mask) else None


def attend(flex: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Call ``flex``, which is ``flex_attention`` or its compiled version, with the kernel's arguments; dropout is refused."""
    check_mask(mask, **options)
    score = None if mask is None else _scores(mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    block = _causal(q.shape[2], k.shape[2], str(q.device)) if options.get("is_causal") else None
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex(q, k, v, score_mod=score, block_mask=block, scale=options.get("scale"), enable_gqa=grouped)
    return out


def _scores(mask: Tensor) -> Callable[..., Tensor]:
    if mask.dtype is torch.bool:
        return lambda score, b, h, query, key: torch.where(mask[b, h, query, key], score, -math.inf)
    return lambda score, b, h, query, key: score + mask[b, h, query, key]


@functools.lru_cache(maxsize=16)
def _causal(queries: int, keys: int, device: str) -> BlockMask:
    return create_block_mask(lambda b, h, query, key: query >= key, None, None, queries, keys, device=device)


@functools.cache
def _compiled_attention() -> Any:
    return torch.compile(flex_attention)
