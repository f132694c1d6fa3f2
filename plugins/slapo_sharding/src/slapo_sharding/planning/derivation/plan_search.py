"""Choice of the plan for a model among variants: with cut whole values, branches, or replicated key heads.

Modules of a plan that use whole sizes run from local forwards, which are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import Schedule, TraceError, get_logger

from ...communication._torch_private import fake_mesh
from ...rules.rulebook import rules_of
from ...splitting.module_paths import without_block_numbers
from ..dry_run.layout_records import LayoutError
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import calls_by_path
from ..dry_run.parallel_branches import find_branches
from ..local_sizes.adapted_modules import (
    adapted_modules,
    cuts_from_outside,
    is_inside,
    modules_that_cut_for,
    num_reduced_gradients,
)
from ..local_sizes.local_attributes import Difference
from ..local_sizes.local_forward import GraphCache, LocalForward, LocalForwardPlan
from ..sequence.sequence_search import SequenceSplitError, split_sequence
from .flat_graphs import in_graph, layer_paths, trace_flat
from .layer_search import DerivedPlan, LayerSearch
from .replicated_key_heads import (
    ReplicatedKeyHeads,
    find_key_heads,
    restore_key_heads,
    unverified_attentions,
    with_replicated_heads,
)
from .replicated_modules import ReplicatedModules, plan_error
from .vocabulary import tied_or_vocabulary


def find_plan(schedule: Schedule, replicated: ReplicatedModules, sequence_parallel: bool) -> DerivedPlan:
    """Return the plan, with replicated key heads if attentions can be split that way."""
    traced = trace_flat(schedule, replicated)
    copies = find_key_heads(schedule.mod, traced, schedule.world_size)
    while copies:
        try:
            derived, failed = _derive_from(schedule, traced, copies, replicated, sequence_parallel)
        except (TraceError, SequenceSplitError) as err:
            get_logger().debug("tensor_parallel: no replicated key heads: %s", err)
            break
        if not failed:
            return derived
        copies = [each for each in copies if type(each.owner) not in {type(other.owner) for other in failed}]
    try:
        return _derive_from(schedule, traced, [], replicated, sequence_parallel)[0]
    except SequenceSplitError as err:
        raise plan_error(schedule, f"the sequence cannot be split: {err}; leave out sequence_parallel") from err


def _derive_from(
    schedule: Schedule,
    traced: fx.GraphModule,
    copies: list[ReplicatedKeyHeads],
    replicated: ReplicatedModules,
    sequence_parallel: bool,
) -> tuple[DerivedPlan, list[ReplicatedKeyHeads]]:
    """Return the plan, and the attentions in ``copies`` that it does not serve."""
    rules, mesh = rules_of(schedule), fake_mesh(schedule.world_size)
    left = tied_or_vocabulary(schedule.mod, schedule.world_size, rules) | replicated.modules(schedule.mod)
    with with_replicated_heads(schedule.mod, copies, rules):
        wide = trace_flat(schedule, replicated) if copies else traced
        whole = {*replicated.layers, *calls_by_path(wide.graph)}
        given = rules.is_layer, rules.is_table, in_graph(left, schedule.mod, wide), replicated.opaque, whole

        def rederive(graph: fx.GraphModule, ranks: DeviceMesh, **options: Any) -> DerivedPlan:
            return LayerSearch(graph, ranks, *given, **options).run()

        derived = rederive(wide, mesh)
        plans = [derived]
        if replicated.adapts and not copies:
            unadapted, adapts = set[str](), "parameters" if sequence_parallel else "all"
            rederive_adapted = partial(rederive, wide, mesh, adapts=adapts, unadapted=unadapted)
            plans = [_with_cut_values(schedule, derived, rederive_adapted, unadapted), derived]
            if not sequence_parallel:
                plans = [_with_branches(schedule, plans[0], rederive_adapted, {*replicated.layers, *replicated.opaque})]
        failed = unverified_attentions(copies, traced, wide, derived, rederive)
        derived = plans[0] if failed or not sequence_parallel else _along_sequence(plans)
        derived.reasons = {**replicated.layers, **derived.reasons}
        derived.replicated_key_heads = [each.owner for each in copies]
        if not failed:
            restore_key_heads(derived, copies)
    return derived, failed


def _along_sequence(plans: list[DerivedPlan]) -> DerivedPlan:
    """Return the first plan with which the sequence can be split too; raise ``SequenceSplitError`` if there is none."""
    plan, *others = plans
    try:
        return replace(plan, layouts=_split_sequence(plan)) if plan.splits else plan
    except SequenceSplitError:
        for other in others:
            with suppress(SequenceSplitError):
                return _along_sequence([other])
        raise


def _with_cut_values(
    schedule: Schedule, derived: DerivedPlan, rederive: Callable[..., DerivedPlan], unadapted: set[str]
) -> DerivedPlan:
    """Return the plan with cut whole values if it is feasible and leaves fewer parameters whole, else ``derived``.

    If a module cannot run from a graph as that plan needs, the search runs again without cuts in it (``unadapted``).
    """
    before = _replicated_numel(schedule, derived)
    while _replicated_numel(schedule, adapted := rederive()) < before:
        unfit = _untraceable_module(schedule, adapted)
        if unfit is None:
            return adapted
        get_logger().debug("tensor_parallel: no whole values are cut in %r: %s", unfit.module, unfit.reason)
        found = {without_block_numbers(module) for module in modules_that_cut_for(adapted.layouts, unfit.module)} - unadapted
        if not found:
            break
        unadapted |= found
    return derived


def _with_branches(
    schedule: Schedule, derived: DerivedPlan, rederive: Callable[..., DerivedPlan], whole: Collection[str]
) -> DerivedPlan:
    """Return the plan in which each rank runs some branches if it fits and leaves fewer parameters whole, else ``derived``."""
    found = find_branches(derived.layouts.graph, schedule.mod, schedule.world_size, whole)
    found = [each for each in found if not all(map(derived.splits_parameter, each.splits(1)))]
    if not found or _replicated_numel(schedule, branched := rederive(branches=found)) >= _replicated_numel(schedule, derived):
        return derived
    if (unfit := _untraceable_module(schedule, branched)) is not None:
        get_logger().debug("tensor_parallel: no branches are distributed in %r: %s", unfit.module, unfit.reason)
        return derived
    return branched


def _replicated_numel(schedule: Schedule, plan: DerivedPlan) -> int:
    """Return the number of elements of the parameters that a plan leaves whole."""
    return sum(each.numel() for name, each in schedule.mod.named_parameters() if not plan.splits_parameter(name))


def _untraceable_module(schedule: Schedule, derived: DerivedPlan) -> Difference | None:
    """Return a module that has to run from a graph and cannot, with the reason, or None. Identical modules are traced once."""
    kinds = {without_block_numbers(path): path for path, must in adapted_modules(derived.layouts).items() if must}
    layers = layer_paths(schedule)
    for path in kinds.values():
        if not path:
            return Difference("the whole model would have to run from one graph", path)
        forward = make_local_forward(schedule, derived, path, layers)
        try:
            target = ".".join(filter(None, (schedule.path, path)))
            summed = forward.check_example(schedule.root_module, target, schedule.example_inputs)
        except TraceError as err:
            return Difference(str(err), path)
        if summed != num_reduced_gradients(derived.layouts, path):
            return Difference("it would reduce other gradients than planned", path)
    return None


def _split_sequence(derived: DerivedPlan) -> Layouts:
    # a trace on real tensors would run collectives whose shapes the ranks do not agree on
    if nodes := derived.layouts.data_dependent_nodes:
        raise SequenceSplitError(f"the result shape of {nodes[0].name} depends on data ({nodes[0].meta.get('source')})")
    try:
        return split_sequence(derived.layouts)
    except SequenceSplitError as err:
        path = str(err.__cause__.node.target) if isinstance(err.__cause__, LayoutError) else ""
        if path not in derived.reasons:
            raise
        raise SequenceSplitError(f"{err}; the layer is not split for this reason: {derived.reasons[path]}") from err


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
