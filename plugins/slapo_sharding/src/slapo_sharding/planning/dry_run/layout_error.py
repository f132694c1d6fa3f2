"""Error of a dry run at an operation that does not fit the layouts of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from .layouts import Layouts

NOT_DIVISIBLE = "not divisible by"
"""Words in the reason for which a size or a number of heads is not split."""


class LayoutError(Exception):
    """Error of a node that cannot run on values with these layouts.

    Args:
        layouts: Dry run.
        node: Node that failed. ``sources`` are the layers whose sharded outputs reach it.
        reason: Reason, as the start of a sentence.
    """

    def __init__(self, layouts: Layouts, node: fx.Node, reason: str) -> None:
        self.layouts, self.node, self.sources = layouts, node, layouts.sources[node]
        where = f" ({source})" if (source := node.meta.get("source")) else ""
        super().__init__(f"{reason} at {node.name}{where}")

    def sharded_sizes(self) -> set[int]:
        """Return the whole sizes of the dimensions along which the inputs of the node are sharded."""
        found = set()
        for other in self.node.all_input_nodes:
            value, local = other.meta.get("val"), self.layouts.local_shapes.get(other)
            if isinstance(value, torch.Tensor) and local is not None:
                found |= {size for size, part in zip(value.shape, local, strict=True) if size != part}
        return found
