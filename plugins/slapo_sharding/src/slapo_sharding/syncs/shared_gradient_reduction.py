"""Reduction of an input's gradient, once for all layers that take the same tensor."""

from __future__ import annotations

import torch

from ..communication import collectives
from . import overlapped_reduction


class SharedGradientReduction:
    """Shared reduction of the partial gradients of several modules that take the same tensor.

    The tensors are compared when the modules run. A tensor that no other module took has its own reduction, so the gradients
    are right whatever the modules take.

    Args:
        group: The ranks that each have a partial gradient.
        members: Number of modules; the tensor is released when all have taken it.
    """

    __slots__ = ("current", "group", "is_shared", "members", "num_left")  # no ``__dict__``: nothing here is model state

    def __init__(self, group: collectives.Group, members: int) -> None:
        self.group, self.members = group, members
        self.num_left = 0
        self.is_shared = False  # True once all modules have taken one tensor, unchanged
        self.current: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def with_shared_reduction(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with a reduced gradient: the same tensor for each module while ``x`` is the same and unchanged."""
        compiling = torch.compiler.is_compiling()
        if compiling and not self.is_shared:  # a compiled graph has no version counters to tell that x is unchanged
            return collectives.all_reduce_grad(x, self.group)
        version = 0 if compiling else x._version
        if self.current is None or self.current[0] is not x or self.current[1] != version:
            self.current, self.num_left = (x, version, overlapped_reduction.with_reduced_gradient(x, self.group)), self.members
        taken = self.current[2]
        self.num_left -= 1
        if self.num_left == 0:
            self.current, self.is_shared = None, True
        return taken
