"""Splits of layers and of parameters that forwards use directly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class LayerSplit:
    """Split of a layer.

    Args:
        output: ``"sharded"``: column-parallel, the output is sharded along the width or the channels and the input is
            replicated. ``"reduced"``: row-parallel, the input is sharded and the partial outputs are summed. ``"kept"``: input
            and output are sharded alike.
        blocks: Sizes of the parts of a fused layer's output. Each part is split by itself.
        replicated: Indices of the blocks that every rank holds whole, such as the keys of a single head. Their gradient is
            summed.
    """

    output: Literal["sharded", "reduced", "kept"]
    blocks: tuple[int, ...] = ()
    replicated: tuple[int, ...] = ()

    def local_numel(self, tensor: torch.Tensor, ranks: int) -> int:
        """Return the number of elements of a whole tensor of the layer that each rank holds."""
        replicated = sum(self.blocks[index] for index in self.replicated)
        whole = tensor.numel() * replicated // sum(self.blocks) if replicated else 0
        return whole + (tensor.numel() - whole) // ranks


@dataclass(frozen=True)
class ParameterSplit:
    """Split of one parameter.

    Args:
        dim: Dimension that is split.
        blocks: Sizes of the parts of a fused projection along ``dim``, each split by itself. Empty for one part.
        owner: Rank that holds the whole parameter. None if each rank holds a shard.
    """

    dim: int
    blocks: tuple[int, ...] = ()
    owner: int | None = None
