"""Masks that are added to the scores of an attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._torch_private import is_transformed

_HIDDEN = -1e3
"""What is added to a score at most where a key is hidden."""
_known: Any = WeakTensorKeyDictionary()
"""Mask to its version, and whether it hides all keys from some query."""


def hides_all(mask: torch.Tensor | None) -> bool:
    """Whether a mask that is added hides all keys from some query; where nobody may look, it may.

    Kernels keep one number for the softmax of a query, in which the sum is lost beside what is added: gradients are wrong then.
    A GPU is waited for, once for each mask.
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
