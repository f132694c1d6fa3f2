"""Checks of masks that are added to the scores of an attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._torch_private import is_transformed

_HIDDEN = -1e3
"""A key is hidden if less than this is added to its score."""
_known: Any = WeakTensorKeyDictionary()
"""Mask to its version counter, and whether it hides all keys from some query."""


def check_mask(mask: torch.Tensor | None, *, is_causal: bool = False, **options: Any) -> None:
    """Raise ``ValueError`` for a mask beside ``is_causal``, of all options of ``attention``."""
    if is_causal and mask is not None:
        raise ValueError("attention takes a mask or is_causal, not both")


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
