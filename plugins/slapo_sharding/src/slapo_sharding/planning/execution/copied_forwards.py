"""Forwards from graphs in blocks that a plan was not derived for: those of the equal blocks that stand for them."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from slapo_core import Schedule, paths
from slapo_tracing.nodes import own_forward

from ...rules.sharding_rule import applied_cut
from ..local_sizes.local_forward import LocalForward
from .plan_steps import split_parameters


class CopiedForward(NamedTuple):
    """Forward for a module in a block that was left out.

    Args:
        path: Path of the module below the block.
        forward: The forward; it is not installed.
        is_split: Whether the plan recorded the module itself as split, as one that uses parameters directly.
    """

    path: str
    forward: LocalForward
    is_split: bool

    def install(self, block: Schedule) -> None:
        """Split the parameters that the forward uses directly, and let the module run it."""
        handle = block[self.path] if self.path else block
        if self.is_split:
            split_parameters(handle, self.forward.parameters)
        for module in handle.mod.modules():
            block.touch(module)
        self.forward.install()


def copied_forwards(block: nn.Module, model: nn.Module, path: str) -> list[CopiedForward]:
    """Return the forwards that a block needs, made while its layers are still whole.

    Args:
        block: Block that was left out.
        model: Equal block, split by the plan.
        path: Path of ``block``, for messages.
    """
    found = []
    for (below, module), other in zip(block.named_modules(), model.modules(), strict=True):
        if isinstance(forward := own_forward(other), LocalForward):
            copied = forward.copy_for(module, paths.join(path, below))
            found.append(CopiedForward(below, copied, applied_cut(other) is not None))
    return found


def runs_from_graph(module: nn.Module) -> bool:
    """Return whether the forward of a module is a graph with local sizes."""
    return isinstance(own_forward(module), LocalForward)
