"""Splits of layers, and of parameters that forwards use themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Split:
    """Split of a layer.

    Args:
        output: What the layer returns: ``"sharded"`` along the width or the channels (its input is replicated), ``"reduced"``
            (its input is sharded so, the partial results are summed), or ``"kept"`` (its input is sharded so as well).
        blocks: Sizes of the parts of a fused layer's output, each split for itself.
    """

    output: Literal["sharded", "reduced", "kept"]
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
