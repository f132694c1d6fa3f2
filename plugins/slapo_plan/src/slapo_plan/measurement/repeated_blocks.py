"""Equal blocks of a model: of a long run of them three are kept while the model is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from torch import fx, nn

from slapo_tracing.nodes import module_signature

from .traced_blocks import PassThrough, block_chains

KEPT = 3
"""Blocks of a run that are measured: the first, one between and the last."""


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal blocks.

    Args:
        holder: The list that holds them, or the parent of each in a traced module.
        names: Names of the blocks in it.
        measured: The block that stands for those that are left out: behind the first one and those that it looks ahead to.
        ahead: Number of further blocks that a block's work touches, e.g. to gather their parameters.
        substitute: Takes the place of a block that is left out where a graph calls it; None to take the block out of its list.
    """

    holder: nn.Module
    names: tuple[str, ...]
    measured: nn.Module
    ahead: int = 0
    substitute: PassThrough | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the blocks that are measured."""
        first = KEPT - 1 + self.ahead
        return self.names if len(self.names) <= first + 1 else (*self.names[:first], self.names[-1])

    @property
    def num_dropped(self) -> int:
        """Number of blocks that are not measured; each is like the measured one."""
        return len(self.names) - len(self.kept)

    def blocks(self) -> list[nn.Module]:
        """Return the blocks that are there now, in order."""
        held = (each for each in self.holder._modules.values() if each is not None)
        return [each for each in held if not isinstance(each, PassThrough)]


def block_runs(module: nn.Module, ahead: int = 0) -> list[BlockRun]:
    """Return the runs of equal elements in the lists of modules, outermost lists only, and of blocks that a graph calls.

    Args:
        module: Root of the modules.
        ahead: Number of further blocks that a block's work touches.
    """
    found: list[BlockRun] = []

    def visit(each: nn.Module) -> None:
        if isinstance(getattr(each, "code", None), str):
            found.extend(_runs_of_graph(each, ahead))
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


def _runs_of_graph(module: nn.Module, ahead: int) -> Iterator[BlockRun]:
    """Yield the runs of blocks with one parent that the graph of a traced module calls one on the result of the other."""
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return
    for paths, substitute in block_chains(graph, module):
        for owner, some in groupby(paths, key=lambda path: path.rpartition(".")[0]):
            names = tuple(path.rpartition(".")[2] for path in some)
            holder = module.get_submodule(owner)
            measured = holder.get_submodule(names[min(1 + ahead, len(names) - 1)])
            yield BlockRun(holder, names, measured, ahead, substitute)


@contextmanager
def trimmed_runs(runs: list[BlockRun]) -> Iterator[None]:
    """Leave out the blocks of long runs that are not measured, within a block."""
    before = [(run.holder, dict(run.holder._modules)) for run in runs]
    try:
        for run in runs:
            for name in set(run.names) - set(run.kept):
                if run.substitute is not None:
                    run.holder._modules[name] = run.substitute
                else:
                    del run.holder._modules[name]
        lists = {id(run.holder): run.holder for run in runs if run.num_dropped and run.substitute is None}
        for holder in lists.values():
            kept = [*holder._modules.values()]
            holder._modules.clear()
            holder._modules.update({str(index): each for index, each in enumerate(kept)})
        yield
    finally:
        for holder, modules in before:
            holder._modules.clear()
            holder._modules.update(modules)
