"""Plans for the submodules of a module that cannot be a graph as a whole; values between them are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from slapo_core import Schedule, ScheduleError, TraceError, get_logger, is_sharded
from slapo_tracing.nodes import is_opaque
from slapo_tracing.tracers import is_container

from .derivation.flat_graphs import layer_paths

_MIN_LAYERS = 2
"""Least number of layers in a submodule: a column-parallel one and a row-parallel one."""


def split_submodules(schedule: Schedule, split: Callable[[Schedule], object]) -> bool:
    """Split the submodules of a module, each by a plan that ``split`` derives and applies; return whether anything is split."""
    for path in list(_submodules(schedule.mod)):
        part = schedule[path]
        if len(layer_paths(part)) >= _MIN_LAYERS and not is_opaque(part.mod) and not _is_split(part.mod):
            try:
                split(part)
            except (ScheduleError, TraceError) as err:
                get_logger().debug("tensor_parallel: %r stays whole: %s", part.path, err)
    return _is_split(schedule.mod)


def _submodules(module: nn.Module) -> Iterator[str]:
    """Yield the paths of a module's children, or of the elements of children that are containers."""
    for name, child in module.named_children():
        if is_container(child):
            yield from (f"{name}.{path}" for path in _submodules(child))
        else:
            yield name


def _is_split(module: nn.Module) -> bool:
    return any(map(is_sharded, module.parameters()))
