"""Equal blocks of a model: of a long run of them three are kept while the model is measured."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from itertools import groupby

import torch
from torch import nn

from slapo_tracing.nodes import forward_wrappers, own_forward

KEPT = 3
"""Blocks of a run that are measured: the first, one between and the last."""

_NUMBERS = re.compile(r"(^|_)(idx|index|id|number|path|name)$")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal elements of a list of modules.

    Args:
        holder: The list.
        names: Names of the elements in it.
        measured: The block that stands for those that are left out: behind the first one and those that it looks ahead to.
        ahead: Number of further blocks that a block's work touches, e.g. to gather their parameters.
        blocks: The elements.
    """

    holder: nn.Module
    names: tuple[str, ...]
    measured: nn.Module
    ahead: int = 0
    blocks: tuple[nn.Module, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the blocks that are measured."""
        first = KEPT - 1 + self.ahead
        return self.names if len(self.names) <= first + 1 else (*self.names[:first], self.names[-1])

    @property
    def dropped_blocks(self) -> list[nn.Module]:
        """Blocks that are not measured."""
        kept = set(self.kept)
        return [block for name, block in zip(self.names, self.blocks, strict=True) if name not in kept]

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
            for _, equal in groupby(children, key=lambda item: block_signature(item[1])):
                names, blocks = zip(*equal, strict=True)
                found.append(BlockRun(each, names, blocks[min(1 + ahead, len(blocks) - 1)], ahead, blocks))
            return
        for child in each.children():
            visit(child)

    visit(module)
    return found


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
