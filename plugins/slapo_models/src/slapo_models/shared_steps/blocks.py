"""The repeated blocks of a model, found by the classes and shapes of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from slapo_core import Schedule, is_module_list, paths

from .configuration import Configuration

_LARGE = 0.01
"""Least share of all blocks' parameters that a list has; shorter ones are heads and the like."""


def block_lists(schedule: Schedule, config: Configuration) -> list[list[Schedule]]:
    """Return the lists of repeated blocks below ``prefix``, in the model's order; empty if there is none.

    A list is a module list, or an ``nn.Sequential``, of modules of one class. The outermost lists with equal blocks are taken,
    so stages of blocks of different widths are looked into, and experts inside a block are not. Without such lists, modules
    of one class beside each other are taken.

    Raises:
        ScheduleError: no module has the path ``prefix``.
    """
    if config.prefix is not None and config.prefix not in schedule:
        raise config.error(schedule, f"there is no module at prefix {config.prefix!r}; leave it out, or give the path of one")
    base = schedule[config.prefix] if config.prefix else schedule
    found = [*_lists_below(base.mod, "")] or [*_siblings_below(base.mod, "")]
    sizes = [sum(_size(base.mod.get_submodule(path)) for path in members) for members in found]
    composite = [any(any(True for _ in base.mod.get_submodule(path).children()) for path in members) for members in found]
    return [
        [base[path] if path else base for path in members]
        for members, size, is_composite in zip(found, sizes, composite, strict=True)
        if size >= _LARGE * sum(sizes) and (is_composite or not any(composite))
    ]


def _lists_below(module: nn.Module, path: str) -> Iterator[list[str]]:
    """Yield the members' paths of each list: the outermost with equal members, or the innermost of one class."""
    if _is_list(module) and _is_of_one_class(module):
        inner = [] if _has_equal_members(module) else [*_lists_of_members(module, path)]
        yield from inner or [[paths.join(path, name) for name in module._modules]]
    else:
        yield from _lists_of_members(module, path)


def _lists_of_members(module: nn.Module, path: str) -> Iterator[list[str]]:
    for name, child in module.named_children():
        yield from _lists_below(child, paths.join(path, name))


def _siblings_below(module: nn.Module, path: str) -> Iterator[list[str]]:
    """Yield the paths of modules of one class that are attributes of one module, outermost first."""
    kinds: dict[Any, list[str]] = {}
    for name, child in module.named_children():
        if any(True for _ in child.children()) and _size(child):
            kinds.setdefault((type(child), _shapes(child)), []).append(name)
    repeated = [names for names in kinds.values() if len(names) > 1]
    yield from ([paths.join(path, name) for name in names] for names in repeated)
    inside = {name for names in repeated for name in names}
    for name, child in module.named_children():
        if name not in inside:
            yield from _siblings_below(child, paths.join(path, name))


def _is_list(module: nn.Module) -> bool:
    return is_module_list(module) or isinstance(module, nn.Sequential)


def _is_of_one_class(module: nn.Module) -> bool:
    return len({type(child) for child in module.children()}) == 1 and _size(module) > 0


def _has_equal_members(module: nn.Module) -> bool:
    """Return whether at least half of the members have parameters of the same names and shapes as another one."""
    shapes = Counter(_shapes(child) for child in module.children())
    return 2 * sum(count for count in shapes.values() if count > 1) >= sum(shapes.values())


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
