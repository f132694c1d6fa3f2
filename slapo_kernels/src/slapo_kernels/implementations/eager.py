"""Every kernel in plain operations of torch: its definition, against which the other implementations are tested."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from slapo_core import ScheduleError

Tensor = torch.Tensor


def _gelu_new(x: Tensor) -> Tensor:
    """Return GELU with the roundings of Transformers' ``NewGELUActivation``."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": _gelu_new,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "silu": F.silu,
}
"""Activations of ``bias_act``."""
CASTS = ("input", "weight")
"""Values of ``cast`` of ``rms_norm``."""


def check_mask(mask: torch.Tensor | None, *, is_causal: bool = False, **options: Any) -> None:
    """Raise ``ValueError`` for a mask beside ``is_causal``, of all options of ``attention``."""
    if is_causal and mask is not None:
        raise ValueError("attention takes a mask or is_causal, not both")


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
    """``softmax(q @ k.T * scale + mask) @ v``, the softmax in at least float32.

    Args:
        q: ``[batch, heads, length, size]``.
        k: As ``q``; its heads divide those of ``q``.
        v: As ``k``.
        mask: Added to the scores, or True for keys to attend to; broadcast. A query without such a key gets zeros.
        dropout_p: Dropout probability of the attention weights; the caller passes 0 in evaluation.
        is_causal: Query ``i`` sees keys up to ``i``; without ``mask``.
        scale: Default: ``size ** -0.5``.
    """
    check_mask(mask, is_causal=is_causal)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    hidden = None if mask is None else (scores == -math.inf).all(-1, keepdim=True)
    if hidden is not None:
        scores = scores.masked_fill(hidden, 0.0)  # gradients of a softmax of infinities are NaN
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return F.dropout(weights.to(q.dtype), dropout_p) @ v


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate pairs ``(i, i + size / 2)`` of the heads' numbers, as ``apply_rotary_pos_emb`` of Transformers.

    Args:
        q: ``[batch, heads, length, size]``, or with the heads at ``unsqueeze_dim``.
        k: As ``q``; it may have other heads.
        cos: ``[batch, length, size]``.
        sin: As ``cos``.
        unsqueeze_dim: Dimension of the heads in ``q`` and ``k``.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_cast(cast: str) -> None:
    """Raise ``ValueError`` unless the argument ``cast`` of ``rms_norm`` is in ``CASTS``."""
    if cast not in CASTS:
        raise ValueError(f"no cast {cast!r}; available: {', '.join(CASTS)}")


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, cast: str = "input") -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * (offset + weight)`` over the last dimension.

    Args:
        x: Any number of rows.
        weight: One row.
        eps: Under the root.
        offset: 1 in Gemma.
        cast: Value that is rounded to the dtype of ``x``: the normalised ``"input"``, before the product (Llama), or the
            product with the ``"weight"``, computed in float32 (Gemma).
    """
    check_cast(cast)
    wide = _at_least_float32(x)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "weight":
        return (normal * (offset + _at_least_float32(weight))).to(x.dtype)
    return (offset + weight if offset else weight) * normal.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension, in float32, rounded at the end."""
    wide = _at_least_float32(x)
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        normal = normal * weight
    return (normal if bias is None else normal + bias).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``; ``approximate`` is ``F.gelu``'s."""
    return F.gelu(gate, approximate=approximate) * up


def bias_act(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """``activation(x + bias)``; the activations are the keys of ``ACTIVATIONS``."""
    return ACTIVATIONS[activation](x if bias is None else x + bias)


def bias_dropout_residual(x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float, training: bool) -> Tensor:
    """``residual + dropout(x + bias)``."""
    return F.dropout(x if bias is None else x + bias, p, training) + residual


def check_labels(hidden: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise ``ScheduleError`` unless there is one label of ``torch.int64`` per row; values are not checked."""
    if labels.shape != hidden.shape[:-1]:
        rows, found = list(hidden.shape[:-1]), list(labels.shape)
        raise ScheduleError(
            f"run('linear_cross_entropy'): labels are of shape {found}, and the rows of hidden states of {rows}"
        )
    if labels.dtype is not torch.long:
        raise ScheduleError(f"run('linear_cross_entropy'): labels are of {labels.dtype}; give them as torch.int64")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``cross_entropy(hidden @ weight.T + bias, labels)``, in float32.

    Args:
        hidden: ``[..., size]``.
        weight: ``[classes, size]``.
        labels: ``[...]``.
        bias: ``[classes]``.
        ignore_index: A label that does not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, which gives the shape of ``labels``.
    """
    check_labels(hidden, labels)
    logits = _at_least_float32(F.linear(hidden, weight, bias)).flatten(0, -2)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(labels.shape) if reduction == "none" else loss


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Rows of ``weight``; the row ``padding_idx`` gets no gradient."""
    rows = weight[ids]
    if padding_idx is None:
        return rows
    padding = (ids == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)
