"""The sum of an input's gradient: once for all layers that are given the same tensor."""

from __future__ import annotations

import torch

from ..communication import collectives
from . import overlapped_reduction


class SharedGradientReduction:
    """Modules that use the same tensor sum its gradient over the group once, all their parts of it together.

    Which tensor that is shows when they run: one that another module has not been given has a sum of its own, so the
    gradients are right whatever the modules are given.

    Args:
        group: The ranks that each have a part of the gradient.
        members: Number of modules; once all have had the tensor, it is let go.
    """

    __slots__ = ("group", "known", "left", "members", "proven")  # what is kept in them is no state of the model

    def __init__(self, group: collectives.Group, members: int) -> None:
        self.group, self.members = group, members
        self.left = 0
        self.proven = False  # that all modules have been given one tensor, unchanged
        self.known: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` for one of the modules, its gradient summed; the same tensor as long as ``x`` is the same and unchanged."""
        compiling = torch.compiler.is_compiling()
        if compiling and not self.proven:  # a graph has no versions to tell that x is unchanged
            return collectives.all_reduce_grad(x, self.group)
        version = 0 if compiling else x._version
        if self.known is None or self.known[0] is not x or self.known[1] != version:
            self.known, self.left = (x, version, overlapped_reduction.with_reduced_gradient(x, self.group)), self.members
        taken = self.known[2]
        self.left -= 1
        if self.left == 0:
            self.known, self.proven = None, True
        return taken
