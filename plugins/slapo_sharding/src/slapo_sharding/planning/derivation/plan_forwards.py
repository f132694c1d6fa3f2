"""Local forwards for the modules of a plan that use whole sizes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from slapo_core import Schedule

from ...splitting.module_paths import without_block_numbers
from ..dry_run.node_values import calls_by_path
from ..local_sizes.adapted_modules import adapted_modules, cuts_from_outside, is_inside
from ..local_sizes.local_forward import GraphCache, LocalForward, LocalForwardPlan
from .flat_graphs import layer_paths
from .layer_search import DerivedPlan


def make_local_forwards(schedule: Schedule, derived: DerivedPlan) -> dict[str, tuple[LocalForward, bool]]:
    """Make local forwards for modules that use whole sizes; none is installed.

    Returns:
        Path to the forward and to whether the module cannot do without it.
    """
    made, calls, layers = {}, dict[Any, GraphCache](), layer_paths(schedule)
    for path, must in adapted_modules(derived.layouts).items():
        if not any(each in derived.replicated_key_heads for each in schedule.mod.get_submodule(path).modules()):
            made[path] = make_local_forward(schedule, derived, path, layers, calls), must
    return made


def make_local_forward(
    schedule: Schedule, derived: DerivedPlan, path: str, layers: Collection[str], calls: dict[Any, GraphCache] | None = None
) -> LocalForward:
    """Make the local forward of a module; identical modules share their graphs in ``calls``."""
    module = schedule.mod.get_submodule(path)
    below = {name: f"{path}.{name}" if path else name for name, _ in module.named_modules() if name}
    split = derived.layouts.splits  # a layer may contain layers, as one with an adapter does
    outer = {name: full for name, full in below.items() if full in layers and not _is_inside_any(full, split.keys())}
    splits = {name: split.get(full) for name, full in outer.items()}
    called = calls_by_path(derived.layouts.graph)
    # forks wrap dropouts, so these must stay calls too
    kept = {name for name, full in below.items() if full in called or name in splits}
    inlined = frozenset(name for name in below if name not in kept and not _is_inside_any(name, kept))
    start = len(path) + 1 if path else 0
    parameters = {name[start:]: split for name, split in derived.parameters.items() if is_inside(name, path)}
    shared = frozenset(name[start:] for name in derived.layouts.shared if is_inside(name, path))
    by_use = frozenset(name[start:] for name in derived.layouts.reduced_per_use if is_inside(name, path))
    cuts_inputs = cuts_from_outside(derived.layouts, path)
    plan = LocalForwardPlan(path, splits, inlined, schedule.world_size, schedule.group, parameters, shared, cuts_inputs, by_use)
    split_keys = (tuple(sorted((n, repr(each)) for n, each in of.items())) for of in (splits, parameters))
    alike = (type(module), without_block_numbers(path), inlined, cuts_inputs, by_use, *split_keys)
    return LocalForward(module, plan, None if calls is None else calls.setdefault(alike, {}))


def _is_inside_any(path: str, others: Collection[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)
