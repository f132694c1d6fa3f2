"""Private names of torch that reductions of losses use; a test fails when torch moves one."""

from __future__ import annotations

import torch


def memory_place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's storage while it lives, and its place there; of fake tensors, too."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())
