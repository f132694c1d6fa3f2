"""Equal blocks of a model: of a long run of them three are kept while the model is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from slapo_tracing.nodes import module_signature

KEPT = 3
"""Blocks of a run that are measured: the first, one between and the last."""


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal elements of a list of modules.

    Args:
        holder: The list.
        names: Names of the elements in it.
        measured: The block that stands for those that are left out: behind the first one and those that it looks ahead to.
        ahead: Number of further blocks that a block's work touches, e.g. to gather their parameters.
    """

    holder: nn.Module
    names: tuple[str, ...]
    measured: nn.Module
    ahead: int = 0

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the blocks that are measured."""
        first = KEPT - 1 + self.ahead
        return self.names if len(self.names) <= first + 1 else (*self.names[:first], self.names[-1])

    @property
    def num_dropped(self) -> int:
        """Number of blocks that are not measured; each is like the measured one."""
        return len(self.names) - len(self.kept)


def block_runs(module: nn.Module, ahead: int = 0) -> list[BlockRun]:
    """Return the runs of equal elements in the lists of modules, outermost lists only.

    Args:
        module: Root of the modules.
        ahead: Number of further blocks that a block's work touches.
    """
    found: list[BlockRun] = []

    def visit(each: nn.Module) -> None:
        if isinstance(getattr(each, "code", None), str):  # a traced forward calls its blocks by name
            return
        if isinstance(each, nn.ModuleList):
            children = [(name, child) for name, child in each._modules.items() if child is not None]
            for _, equal in groupby(children, key=lambda item: module_signature(item[1])):
                names, blocks = zip(*equal, strict=True)
                found.append(BlockRun(each, names, blocks[min(1 + ahead, len(blocks) - 1)], ahead))
            return
        for child in each.children():
            visit(child)

    visit(module)
    return found


@contextmanager
def trimmed_runs(runs: list[BlockRun]) -> Iterator[None]:
    """Leave out the blocks of long runs that are not measured, within a block."""
    before = [(run.holder, dict(run.holder._modules)) for run in runs]
    try:
        for run in runs:
            for name in set(run.names) - set(run.kept):
                del run.holder._modules[name]
        for holder in {id(run.holder): run.holder for run in runs if run.num_dropped}.values():
            kept = [*holder._modules.values()]
            holder._modules.clear()
            holder._modules.update({str(index): each for index, each in enumerate(kept)})
        yield
    finally:
        for holder, modules in before:
            holder._modules.clear()
            holder._modules.update(modules)
