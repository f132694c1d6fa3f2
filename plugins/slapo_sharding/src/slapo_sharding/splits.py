"""Splits of layers, and of parameters that forwards use themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Split:
    """Split of a layer.

    Args:
        output: What the layer returns: ``"sharded"`` along the last dimension (its input is replicated) or ``"reduced"`` (its
            input is sharded along the last dimension, the partial results are summed).
        blocks: Sizes of the parts of a fused layer's output, each split for itself.
    """

    output: Literal["sharded", "reduced"]
    blocks: tuple[int, ...] = ()


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
