"""Size attributes of the unmodified modules, from before a schedule or its user made them local.

A shard step lets ``num_heads`` count this rank's heads, and a user sets ``sch["attn"].mod.heads //= 2``. A rerun of a module on
whole values needs the values that these attributes had when the schedule was created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...rules.sharding_rule import split_of

_recorded: Any = WeakIdKeyDictionary()
"""Module to its size attributes, and those of its config."""


def record_sizes(model: nn.Module) -> None:
    """Record the sizes in the attributes of an unmodified model."""
    for module in model.modules():
        if module not in _recorded:
            _recorded[module] = [(in_config, dict(_sizes(holder))) for in_config, holder in _holders(module)]


@contextmanager
def original_sizes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the original sizes of modules in the block; sharded layers keep their local sizes."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in modules:
            for holder, name, value in _divided_attributes(module) if split_of(module) is None else ():
                changed.append((holder, name, holder[name]))
                holder[name] = value
        yield
    finally:
        for holder, name, value in reversed(changed):
            holder[name] = value


def _divided_attributes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the attributes whose original values are multiples of the present ones: table, name and original value."""
    now = dict(_holders(module))
    for in_config, sizes in _recorded.get(module, ()):
        table = vars(now[in_config]) if in_config in now else {}
        for name, value in sizes.items():
            if _is_multiple(value, table.get(name)):
                yield table, name, value


def _holders(module: nn.Module) -> Iterator[tuple[bool, Any]]:
    yield False, module
    if hasattr(config := module.__dict__.get("config"), "__dict__"):
        yield True, config


def _sizes(holder: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(holder).items():
        if type(value) is int:
            yield name, value
        elif type(value) in (list, tuple) and value and all(type(each) is int for each in value):
            yield name, type(value)(value)


def _is_multiple(whole: Any, now: Any) -> bool:
    """Return whether a size, or one of several, was divided, and no other changed."""
    if type(whole) is not type(now):
        return False
    pairs = [(whole, now)] if isinstance(whole, int) else list(zip(whole, now, strict=False))
    if not isinstance(whole, int) and len(whole) != len(now):
        return False
    return whole != now and all(one == other or (0 < other < one and one % other == 0) for one, other in pairs)
