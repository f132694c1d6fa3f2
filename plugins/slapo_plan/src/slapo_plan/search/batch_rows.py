"""Batches with other numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slapo_core import SlapoError


def with_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the batch with another number of rows, which repeat.

    Raises:
        SlapoError: no tensor has rows.
    """
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not sizes or not sizes[0]:
        raise SlapoError("plan: the batch has no tensor with rows; give the arguments of the forward by name")

    def repeat(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != sizes[0]:
            return value
        value = torch.zeros_like(value, device="cpu") if value.is_meta else value
        return value.repeat(-(-rows // sizes[0]), *[1] * (value.dim() - 1))[:rows]

    return {name: repeat(value) for name, value in batch.items()}
