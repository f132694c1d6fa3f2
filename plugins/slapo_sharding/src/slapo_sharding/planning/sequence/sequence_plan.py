"""Plan of a split sequence: the collectives at module boundaries, and the layers between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from .module_boundaries import Boundary

Backward = Literal["split", "reduce_scatter"]


@dataclass(frozen=True)
class BoundaryCollective:
    """Collective on a value at a module boundary.

    Args:
        op: ``"scatter"`` or ``"all_gather"``.
        backward: Backward of ``all_gather``.
        axis: 1, or 0 for a value that is flattened to ``[tokens, width]``.
    """

    op: Literal["scatter", "all_gather"]
    backward: Backward = "split"
    axis: int = 1

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``sync`` beside the mode."""
        backward = {"backward": self.backward} if self.op == "all_gather" else {}
        return {"axis": self.axis, **backward}


@dataclass
class SequencePlan:
    """Plan of a split sequence.

    Args:
        collectives: Collective at each boundary.
        blocks: Paths of the repeated layers, to the shape ``[batch, sequence, width]`` of their input. Values between them are
            split.
        whole: Paths of modules inside the layers that work on the whole sequence, up to their end.
        flattens: Whether split values may be flattened to ``[tokens, width]``, so that layers see the tokens in another order.
    """

    collectives: dict[Boundary, BoundaryCollective] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    flattens: bool = False

    def block_around(self, path: str) -> str | None:
        """Return the repeated layer that is this module or contains it."""
        names = path.split(".")
        outer = (".".join(names[:count]) for count in range(1, len(names) + 1))
        return next((block for block in outer if block in self.blocks), None)

    def block_of(self, path: str) -> str | None:
        """Return the repeated layer that contains this module."""
        return None if path in self.blocks else self.block_around(path)

    def splits_output(self, node: fx.Node) -> bool:
        """Return whether the output of a row-parallel layer stays split along the sequence."""
        path = str(node.target)
        block = self.block_of(path)
        if block is None or any(path.startswith(f"{module}.") for module in self.whole):
            return False
        batch, length, width = self.blocks[block]
        return tuple(node.meta["val"].shape) in ((batch, length, width), (batch * length, width))
