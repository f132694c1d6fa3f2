"""Repeated blocks of a model: of a long run of equal blocks or patterns of blocks, three are kept while it is measured."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Literal

from torch import fx, nn

from slapo_tracing.nodes import module_signature

from ..recording.segments import RepeatedBlocks
from .traced_blocks import PassThrough, block_chains

Trims = Literal["all", "largest", "none"]
"""Runs of which blocks are left out."""

KEPT = 3
"""Patterns of a run that are measured: the first, one between and the last."""

LONGEST_PATTERN = 12
"""Most blocks of a pattern that is looked for, such as five layers with a window and one without."""


@dataclass(frozen=True)
class BlockRun:
    """Consecutive elements of a list of modules that repeat a pattern: one block, or a few different ones.

    Args:
        holder: The list that holds them, or their parent in a traced module.
        names: Names of the elements in it, of whole patterns.
        blocks: These elements.
        length: Number of blocks of the pattern.
        ahead: Number of further blocks that a block's work touches, e.g. to gather their parameters.
        substitute: Takes the place of a block that is left out where a graph calls it; None to take the block out of its list.
    """

    holder: nn.Module
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    length: int = 1
    ahead: int = 0
    substitute: PassThrough | None = None

    @property
    def first(self) -> tuple[nn.Module, ...]:
        """The first pattern."""
        return self.blocks[: self.length]

    @property
    def measured_blocks(self) -> tuple[nn.Module, ...]:
        """The pattern that stands for those left out: behind the first one and those that it looks ahead to."""
        end = min(self.length * _num_first(self.ahead, self.length), len(self.blocks))
        return self.blocks[end - self.length : end]

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the blocks that are measured."""
        first = self.length * _num_first(self.ahead, self.length)
        is_short = len(self.names) <= first + self.length
        return self.names if is_short else (*self.names[:first], *self.names[-self.length :])

    @property
    def kept_blocks(self) -> list[nn.Module]:
        """Blocks that are measured."""
        kept = set(self.kept)
        return [block for name, block in zip(self.names, self.blocks, strict=True) if name in kept]

    def repeated_blocks(self, paths: Mapping[int, str]) -> RepeatedBlocks:
        """Return how often the measured pattern runs, by the path of each module (by id)."""
        measured, first = (tuple(paths[id(block)] for block in blocks) for blocks in (self.measured_blocks, self.first))
        return RepeatedBlocks(measured, first, self.num_dropped)

    @property
    def dropped_blocks(self) -> list[nn.Module]:
        """Blocks that are not measured."""
        kept = set(self.kept)
        return [block for name, block in zip(self.names, self.blocks, strict=True) if name not in kept]

    @property
    def num_dropped(self) -> int:
        """Number of patterns that are not measured; each is like the measured one."""
        return (len(self.names) - len(self.kept)) // self.length


def _num_first(ahead: int, length: int) -> int:
    """Return the number of patterns of ``length`` blocks that are kept before those that are left out."""
    return KEPT - 1 + ceil(ahead / length)


def block_runs(module: nn.Module, ahead: int = 0, longest: int = 1) -> list[BlockRun]:
    """Return the runs in the lists of modules, outermost lists only, and those that a graph calls.

    Args:
        module: Root of the modules.
        ahead: Number of further blocks that a block's work touches.
        longest: Most blocks of a pattern.
    """
    found: list[BlockRun] = []

    def visit(each: nn.Module) -> None:
        if isinstance(getattr(each, "code", None), str):  # a traced forward calls its blocks by name
            found.extend(_runs_of_graph(each, ahead))
            return
        children = [(name, child) for name, child in each._modules.items() if child is not None]
        if isinstance(each, nn.ModuleList) and all(_can_run(child) for _, child in children):
            signatures = [module_signature(child) for _, child in children]
            for start, length, times in _patterns(signatures, ahead, longest):
                names, blocks = zip(*children[start : start + length * times], strict=True)
                found.append(BlockRun(each, names, blocks, length, ahead))
            return
        for _, child in children:
            visit(child)

    visit(module)
    return found


def _can_run(module: nn.Module) -> bool:
    """Return False for a container without a forward, such as a ``ModuleDict``: its parent runs what it holds."""
    return type(module).forward is not nn.Module.forward


def largest_run(runs: Sequence[BlockRun]) -> list[BlockRun]:
    """Return the run whose blocks that are left out have the most bytes of parameters, as a list; empty without runs."""

    def nbytes(run: BlockRun) -> int:
        return sum(parameter.nbytes for block in run.dropped_blocks for parameter in block.parameters())

    return [max(runs, key=nbytes)] if runs else []


def _patterns(signatures: Sequence[Hashable], ahead: int, longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, length and number of repetitions of patterns that follow each other, those that leave most blocks out.

    Example:
        >>> [*_patterns("xababababac", 0, 2)]
        [(0, 1, 1), (1, 2, 4), (9, 1, 1), (10, 1, 1)]
    """
    start = 0
    while start < len(signatures):
        lengths = range(1, min(longest, len(signatures) - start) + 1)
        counts = {length: _repetitions(signatures, start, length) for length in lengths}

        def num_left_out(length: int, counts: Mapping[int, int] = counts) -> int:
            return length * max(0, counts[length] - _num_first(ahead, length) - 1)

        length = max(lengths, key=num_left_out)  # the shortest of several
        yield start, length, counts[length]
        start += length * counts[length]


def _repetitions(signatures: Sequence[Hashable], start: int, length: int) -> int:
    pattern, count = signatures[start : start + length], 1
    while signatures[start + count * length : start + (count + 1) * length] == pattern:
        count += 1
    return count


def _runs_of_graph(module: nn.Module, ahead: int) -> Iterator[BlockRun]:
    """Yield the runs of blocks with one parent that the graph of a traced module calls one on the result of the other."""
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return
    for paths, substitute in block_chains(graph, module):
        for owner, some in groupby(paths, key=lambda path: path.rpartition(".")[0]):
            holder, names = module.get_submodule(owner), tuple(path.rpartition(".")[2] for path in some)
            yield BlockRun(holder, names, tuple(map(holder.get_submodule, names)), 1, ahead, substitute)


class BlocksNotRunError(RuntimeError):
    """Error of a model that runs the contents of a block and not the block, so that no hook sees where it begins."""

    @staticmethod
    def check(blocks: Iterable[str], ran: Container[str]) -> None:
        """Raise the error if some blocks, by path, did not run."""
        if missing := [path for path in blocks if path not in ran]:
            raise BlocksNotRunError(f"the model does not call {missing[0]!r}")


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
