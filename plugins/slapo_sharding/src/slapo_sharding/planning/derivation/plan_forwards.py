"""Forwards with sizes of parts for the modules of a plan that count whole ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from slapo_core import Schedule

from ...splitting.module_paths import without_block_numbers
from ..local_sizes.adapted_modules import cuts_from_outside, is_inside, owners
from ..local_sizes.local_forward import Calls, LocalForward, Plan
from .flat_graphs import layer_paths
from .layer_search import Derived


def local_forwards(schedule: Schedule, derived: Derived) -> dict[str, tuple[LocalForward, bool]]:
    """Make forwards with sizes of parts for modules that count whole ones; none is put in place.

    Returns:
        By path the forward, and whether the module cannot do without it.
    """
    made, calls, layers = {}, dict[Any, Calls](), layer_paths(schedule)
    for path, must in owners(derived.layouts).items():
        if not any(each in derived.copied for each in schedule.mod.get_submodule(path).modules()):
            made[path] = local_forward(schedule, derived, path, layers, calls), must
    return made


def local_forward(
    schedule: Schedule, derived: Derived, path: str, layers: Collection[str], calls: dict[Any, Calls] | None = None
) -> LocalForward:
    """Make the forward of a module; identical ones share their graphs in ``calls``."""
    module = schedule.mod.get_submodule(path)
    below = {name: f"{path}.{name}" if path else name for name, _ in module.named_modules() if name}
    split = derived.layouts.splits  # a layer may be made of layers, as an adapter is
    splits = {
        name: split.get(full) for name, full in below.items() if full in layers and not _is_inside_any(full, split.keys())
    }
    called = {str(node.target) for node in derived.layouts.graph.find_nodes(op="call_module")}
    kept = {name for name, full in below.items() if full in called or name in splits}  # dropouts get wrappers, for one
    opened = frozenset(name for name in below if name not in kept and not _is_inside_any(name, kept))
    start = len(path) + 1 if path else 0
    parameters = {name[start:]: split for name, split in derived.parameters.items() if is_inside(name, path)}
    shared = frozenset(name[start:] for name in derived.layouts.shared if is_inside(name, path))
    by_use = frozenset(name[start:] for name in derived.layouts.summed_by_use if is_inside(name, path))
    cuts_inputs = cuts_from_outside(derived.layouts, path)
    plan = Plan(path, splits, opened, schedule.world_size, schedule.group, parameters, shared, cuts_inputs, by_use)
    alike = (
        type(module),
        without_block_numbers(path),
        opened,
        cuts_inputs,
        by_use,
        *(tuple(sorted((n, repr(each)) for n, each in of.items())) for of in (splits, parameters)),
    )
    return LocalForward(module, plan, None if calls is None else calls.setdefault(alike, {}))


def _is_inside_any(path: str, others: Collection[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)
