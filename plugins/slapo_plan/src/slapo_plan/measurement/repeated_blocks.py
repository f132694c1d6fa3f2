"""Repeated blocks of a model: of a long run of equal blocks or patterns of blocks, three are kept while it is measured."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from math import ceil

import torch
from torch import nn

from slapo_tracing.nodes import forward_wrappers, own_forward

KEPT = 3
"""Patterns of a run that are measured: the first, one between and the last."""

LONGEST_PATTERN = 12
"""Most blocks of a pattern that is looked for, such as five layers with a window and one without."""

_NUMBERS = re.compile(r"(^|_)(idx|index|id|number|path|name)$")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True)
class BlockRun:
    """Consecutive elements of a list of modules that repeat a pattern: one block, or a few different ones.

    Args:
        holder: The list.
        names: Names of the elements in it, of whole patterns.
        blocks: These elements.
        length: Number of blocks of the pattern.
        ahead: Number of further blocks that a block's work touches, e.g. to gather their parameters.
    """

    holder: nn.Module
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    length: int = 1
    ahead: int = 0

    @property
    def first(self) -> tuple[nn.Module, ...]:
        """The first pattern."""
        return self.blocks[: self.length]

    @property
    def measured(self) -> tuple[nn.Module, ...]:
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
    def num_dropped(self) -> int:
        """Number of patterns that are not measured; each is like the measured one."""
        return (len(self.names) - len(self.kept)) // self.length


def _num_first(ahead: int, length: int) -> int:
    """Return the number of patterns of ``length`` blocks that are kept before those that are left out."""
    return KEPT - 1 + ceil(ahead / length)


def block_runs(module: nn.Module, ahead: int = 0, longest: int = 1) -> list[BlockRun]:
    """Return the runs in the lists of modules, outermost lists only.

    Args:
        module: Root of the modules.
        ahead: Number of further blocks that a block's work touches.
        longest: Most blocks of a pattern.
    """
    found: list[BlockRun] = []

    def visit(each: nn.Module) -> None:
        if isinstance(getattr(each, "code", None), str):  # a traced forward calls its blocks by name
            return
        if isinstance(each, nn.ModuleList):
            children = [(name, child) for name, child in each._modules.items() if child is not None]
            signatures = [block_signature(child) for _, child in children]
            for start, length, times in _patterns(signatures, ahead, longest):
                names, blocks = zip(*children[start : start + length * times], strict=True)
                found.append(BlockRun(each, names, blocks, length, ahead))
            return
        for child in each.children():
            visit(child)

    visit(module)
    return found


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


def block_signature(module: nn.Module) -> Hashable:
    """Return what decides the work and memory of a module: equal for layers that differ in their weights and numbers."""
    return tuple(map(_facts, module.modules()))


def _facts(module: nn.Module) -> Hashable:
    tensors = [
        (name, each.shape, each.dtype, each.requires_grad)
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    ]
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    called = [hook for table in tables for hook in table.values()]
    own = own_forward(module)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return (kind, *_settings(vars(module)), *tensors, *map(_code, [own, *forward_wrappers(module), *called]))


def _code(called: object) -> Hashable:
    """Return what a hook or wrapper does, without the tensors and modules it is bound to."""
    inner = getattr(called, "func", called)  # of a partial
    state = getattr(inner, "__dict__", {})
    policies = [repr(value) for value in state.values() if is_dataclass(value)]
    return (getattr(inner, "__qualname__", type(inner)), *_settings(state), *policies)


def _settings(state: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the plain attributes that decide what runs: all but numbers and paths of the layer itself."""
    return [(name, value) for name, value in state.items() if isinstance(value, _PLAIN) and not _NUMBERS.search(name)]


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
