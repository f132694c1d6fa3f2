"""Where the sequence is split: what happens at which borders, between which layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from .module_boundaries import Boundary

Backward = Literal["split", "reduce_scatter"]


@dataclass(frozen=True)
class BoundaryCollective:
    """What happens to a value at a border.

    Args:
        op: ``"scatter"`` or ``"all_gather"``.
        backward: Of ``all_gather``.
        axis: 1, or 0 for a value that is flattened to ``[tokens, width]``.
    """

    op: Literal["scatter", "all_gather"]
    backward: Backward = "split"
    axis: int = 1

    def arguments(self) -> dict[str, Any]:
        """What ``sync`` is given beside the mode."""
        backward = {"backward": self.backward} if self.op == "all_gather" else {}
        return {"axis": self.axis, **backward}


@dataclass
class SequencePlan:
    """Where the sequence is split.

    Args:
        collectives: What happens at which borders.
        blocks: Paths of the repeated layers, between which values are split, to the shape of these.
        whole: Paths of modules inside them that do their work on all of the sequence, to the end.
        flattens: Whether split values may be flattened to ``[tokens, width]``, and their layers see tokens in another order.
    """

    collectives: dict[Boundary, BoundaryCollective] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    flattens: bool = False

    def block_around(self, path: str) -> str | None:
        """The repeated layer that a module is, or is inside of."""
        names = path.split(".")
        outer = (".".join(names[:count]) for count in range(1, len(names) + 1))
        return next((block for block in outer if block in self.blocks), None)

    def block_of(self, path: str) -> str | None:
        """The repeated layer that a module is inside of."""
        return None if path in self.blocks else self.block_around(path)

    def splits_output(self, node: fx.Node) -> bool:
        """Whether the result of a row-parallel layer is left split."""
        path = str(node.target)
        block = self.block_of(path)
        if block is None or any(path.startswith(f"{module}.") for module in self.whole):
            return False
        batch, length, width = self.blocks[block]
        return tuple(node.meta["val"].shape) in ((batch, length, width), (batch * length, width))
