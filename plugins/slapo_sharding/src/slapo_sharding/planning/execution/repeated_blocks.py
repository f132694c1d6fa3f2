"""Repeated blocks of a model: long runs of equal ones, which a plan is derived for once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from slapo_core import Schedule, paths
from slapo_tracing.nodes import module_signature

KEPT_PERIODS = 3
"""Periods of a run that stay while the plan is derived: the first, one between others, and one that confirms it."""

_LONGEST_PERIOD = 8
_PLAIN = (bool, int, float, str, bytes, torch.dtype, type(None))


class RepeatedBlocks(NamedTuple):
    """A run of equal blocks, or of groups of blocks that repeat.

    Args:
        path: Path of the list below the schedule's module.
        holder: The list.
        models: Names of the blocks of the second period, which stand for those that are left out.
        confirming: Names of the blocks of the third period, to those that they must equal.
        left_out: Names of the blocks that are left out, to those that stand for them.
    """

    path: str
    holder: nn.ModuleList
    models: tuple[str, ...]
    confirming: Mapping[str, str]
    left_out: Mapping[str, str]


def repeated_blocks(schedule: Schedule) -> list[RepeatedBlocks]:
    """Return the long runs of equal blocks in the outermost lists of a module.

    Blocks that share a module or a tensor with another part of the model are none.
    """
    found = []
    for path, holder in _outermost_lists(schedule.mod, ""):
        names = [*holder._modules]
        signatures = [_signature(block) for block in holder]
        for first, period, last in _periodic_runs(signatures):
            kept = first + KEPT_PERIODS * period
            places = {names[index]: names[first + period + (index - first) % period] for index in range(first + period, last)}
            models = tuple(names[first + period : first + 2 * period])
            confirming = {name: places[name] for name in names[first + 2 * period : kept]}
            found.append(RepeatedBlocks(path, holder, models, confirming, {name: places[name] for name in names[kept:last]}))
    return found if _are_apart(schedule.root_module, found) else []


@contextmanager
def without_repeated(runs: Sequence[RepeatedBlocks]) -> Iterator[None]:
    """Leave the blocks out of their lists that others stand for, within a ``with`` block."""
    before = {run.holder: dict(run.holder._modules) for run in runs}
    try:
        for run in runs:
            for name in run.left_out:
                del run.holder._modules[name]
        yield
    finally:
        for holder, modules in before.items():
            holder._modules.clear()
            for name, module in modules.items():
                holder.add_module(name, module)  # tells the index of places


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    if isinstance(module, nn.ModuleList):
        yield path, module
        return
    if isinstance(getattr(module, "code", None), str):  # a traced forward calls its blocks by name
        return
    for name, child in module.named_children():
        yield from _outermost_lists(child, paths.join(path, name))


def _periodic_runs(signatures: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """Yield start, period and end of stretches that repeat so often that leaving some out pays."""
    first = 0
    while first < len(signatures):
        ends = {period: _end_of_run(signatures, first, period) for period in range(1, _LONGEST_PERIOD + 1)}
        left_out = {period: last - first - KEPT_PERIODS * period for period, last in ends.items()}
        period = max(left_out, key=lambda each: (left_out[each], -each))
        if left_out[period] > period:
            yield first, period, ends[period]
            first = ends[period]
        else:
            first += 1


def _end_of_run(signatures: Sequence[Hashable], first: int, period: int) -> int:
    last = first + period
    while last < len(signatures) and signatures[last] == signatures[last - period]:
        last += 1
    return min(last, len(signatures))


def _signature(block: nn.Module) -> Hashable:
    """Return what decides the plan of a block: its facts, plain containers, configs and devices."""
    contents = []
    for module in block.modules():
        state = vars(module)
        plain = {name: repr(value) for name, value in state.items() if not name.startswith("_") and _is_plain(value)}
        tensors = (*module._parameters.values(), *module._buffers.values())
        devices = tuple(str(each.device) for each in tensors if each is not None)
        contents.append((tuple(plain.items()), id(state.get("config")), devices))
    return (module_signature(block), tuple(contents))


def _is_plain(value: object) -> bool:
    """Return whether a value is a container of plain values; these themselves are in ``module_signature``."""
    if isinstance(value, dict):
        return all(map(_is_leaf_or_plain, (*value, *value.values())))
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(_is_leaf_or_plain, value))


def _is_leaf_or_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or _is_plain(value)


def _are_apart(root: nn.Module, runs: Sequence[RepeatedBlocks]) -> bool:
    """Return whether the blocks that would be left out share no module and no tensor with the rest, or with each other."""
    owners: dict[int, int] = {}
    for number, block in enumerate(run.holder._modules[name] for run in runs for name in run.left_out):
        assert block is not None
        for part in _parts(block):
            if owners.setdefault(part, number) != number:
                return False
    with without_repeated(runs):
        return owners.keys().isdisjoint(_parts(root))


def _parts(module: nn.Module) -> Iterator[int]:
    for each in module.modules():
        yield id(each)
        yield from (id(value) for value in (*each._parameters.values(), *each._buffers.values()) if value is not None)
