"""Splits of layers, and of parameters that forwards use themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class LayerSplit:
    """Split of a layer.

    Args:
        output: What the layer returns: ``"sharded"`` along the width or the channels (its input is replicated), ``"reduced"``
            (its input is sharded so, the partial results are summed), or ``"kept"`` (its input is sharded so as well).
        blocks: Sizes of the parts of a fused layer's output, each split for itself.
        copied: Places of the blocks that every rank holds whole instead, as keys of one head; their gradient is summed.
    """

    output: Literal["sharded", "reduced", "kept"]
    blocks: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()

    def local_number(self, tensor: torch.Tensor, ranks: int) -> int:
        """Return how many elements of a whole tensor of the layer each of the ranks holds."""
        copied = sum(self.blocks[place] for place in self.copied)
        whole = tensor.numel() * copied // sum(self.blocks) if copied else 0
        return whole + (tensor.numel() - whole) // ranks


@dataclass(frozen=True)
class ParameterSplit:
    """Split of one parameter.

    Args:
        dim: Dimension that is split.
        blocks: Sizes of the parts of a fused projection along it, each split for itself; empty for one part.
        owner: The rank that holds all of it; None where each has a part.
    """

    dim: int
    blocks: tuple[int, ...] = ()
    owner: int | None = None
