"""The plan for a model: derived from its forward, with key heads in copies and whole values cut where that splits more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import fx

from slapo_core import Schedule, ScheduleError, TraceError, get_logger

from ...communication._torch_private import fake_mesh
from ...rules.rulebook import rules_of
from ...splitting.module_paths import without_block_numbers
from ..dry_run.layouts import LayoutError, Layouts
from ..dry_run.parallel_branches import find_branches
from ..local_sizes.adapted_modules import adapting, num_summed, owners
from ..local_sizes.local_attributes import Difference
from ..sequence.sequence_search import CannotSplit, split_sequence
from .flat_graphs import called_paths, in_graph, layer_paths, trace_flat
from .layer_search import Derived, derive
from .plan_forwards import local_forward
from .replicated_key_heads import KeyCopies, key_copies, narrow, unshown, widened
from .replicated_modules import LeftWhole
from .vocabulary import tied_or_vocabulary


def find_plan(schedule: Schedule, whole: LeftWhole, sequence_parallel: bool) -> Derived:
    """Return the plan: with key heads in copies, where attentions can be split so.

    Raises:
        ScheduleError: the sequence cannot be split.
        TraceError: a forward cannot be a graph.
    """
    traced = trace_flat(schedule, whole)
    copies = key_copies(schedule.mod, traced, schedule.world_size)
    while copies:
        try:
            derived, failed = _derive_from(schedule, traced, copies, whole, sequence_parallel)
        except (TraceError, CannotSplit) as err:
            get_logger().debug("tensor_parallel: no key heads in copies: %s", err)
            break
        if not failed:
            return derived
        copies = [each for each in copies if type(each.owner) not in {type(other.owner) for other in failed}]
    try:
        return _derive_from(schedule, traced, [], whole, sequence_parallel)[0]
    except CannotSplit as err:
        message = f"the sequence cannot be split: {err}; leave out sequence_parallel"
        raise ScheduleError(message, path=schedule.path, primitive="tensor_parallel") from err


def _derive_from(
    schedule: Schedule, traced: fx.GraphModule, copies: list[KeyCopies], whole: LeftWhole, sequence_parallel: bool
) -> tuple[Derived, list[KeyCopies]]:
    """Return the plan, and those of the attentions for which it is none."""
    rules, mesh = rules_of(schedule), fake_mesh(schedule.world_size)
    left = tied_or_vocabulary(schedule.mod, schedule.world_size, rules) | whole.modules(schedule.mod)
    with widened(schedule.mod, copies, rules):
        wide = trace_flat(schedule, whole) if copies else traced
        rederive = partial(
            derive,
            is_layer=rules.is_layer,
            is_table=rules.is_table,
            left_whole=in_graph(left, schedule.mod, wide),
            opaque=whole.opaque,
            whole_parameters={*whole.layers, *called_paths(wide.graph)},
        )
        derived = rederive(wide, mesh)
        plans = [derived]
        if whole.adapts and not copies:
            unadapted, adapts = set[str](), "parameters" if sequence_parallel else "all"
            rederive_adapted = partial(rederive, wide, mesh, adapts=adapts, unadapted=unadapted)
            plans = [_adapted(schedule, derived, rederive_adapted, unadapted), derived]
            if not sequence_parallel:
                plans = [_with_branches(schedule, plans[0], rederive_adapted, {*whole.layers, *whole.opaque})]
        failed = unshown(copies, traced, wide, derived, rederive)
        derived = plans[0] if failed or not sequence_parallel else _along_sequence(plans)
        derived.reasons = {**whole.layers, **derived.reasons}
        derived.copied = [each.owner for each in copies]
        if not failed:
            narrow(derived, copies)
    return derived, failed


def _along_sequence(plans: list[Derived]) -> Derived:
    """Return the first plan with which the sequence can be split, too.

    Raises:
        CannotSplit: it cannot with any of them.
    """
    plan, *others = plans
    try:
        return replace(plan, layouts=_split_sequence(plan)) if plan.splits else plan
    except CannotSplit:
        for other in others:
            with suppress(CannotSplit):
                return _along_sequence([other])
        raise


def _adapted(schedule: Schedule, derived: Derived, rederive: Callable[..., Derived], unadapted: set[str]) -> Derived:
    """Return the plan in which whole values are cut, where it leaves less whole than the other one, and can be carried out.

    Where a module that would have to run from a graph cannot, none are cut in this one; its kind is added to ``unadapted``.
    """
    before = _whole_numbers(schedule, derived)
    while _whole_numbers(schedule, adapted := rederive()) < before:
        unfit = _unfit(schedule, adapted)
        if unfit is None:
            return adapted
        get_logger().debug("tensor_parallel: no whole values are cut in %r: %s", unfit.module, unfit.reason)
        found = {without_block_numbers(module) for module in adapting(adapted.layouts, unfit.module)} - unadapted
        if not found:
            break
        unadapted |= found
    return derived


def _with_branches(schedule: Schedule, derived: Derived, rederive: Callable[..., Derived], whole: Collection[str]) -> Derived:
    """Return the plan in which each rank runs some of the branches, if it fits and less stays whole than in the other one."""
    found = find_branches(derived.layouts.graph, schedule.mod, schedule.world_size, whole)
    found = [each for each in found if not all(map(derived.splits_parameter, each.splits(1)))]
    if not found or _whole_numbers(schedule, dealt := rederive(dealt=found)) >= _whole_numbers(schedule, derived):
        return derived
    if (unfit := _unfit(schedule, dealt)) is not None:
        get_logger().debug("tensor_parallel: no branches are dealt out in %r: %s", unfit.module, unfit.reason)
        return derived
    return dealt


def _whole_numbers(schedule: Schedule, plan: Derived) -> int:
    """Return how many numbers of parameters a plan leaves whole."""
    return sum(each.numel() for name, each in schedule.mod.named_parameters() if not plan.splits_parameter(name))


def _unfit(schedule: Schedule, derived: Derived) -> Difference | None:
    """Return which module has to run from a graph and cannot; None where all can. Identical modules are traced once."""
    kinds = {without_block_numbers(path): path for path, must in owners(derived.layouts).items() if must}
    layers = layer_paths(schedule)
    for path in kinds.values():
        if not path:
            return Difference("the whole model would have to run from one graph", path)
        forward = local_forward(schedule, derived, path, layers)
        try:
            summed = forward.try_on(
                schedule.root_module, ".".join(filter(None, (schedule.path, path))), schedule.example_inputs
            )
        except TraceError as err:
            return Difference(str(err), path)
        if summed != num_summed(derived.layouts, path):
            return Difference("it would sum other gradients than planned", path)
    return None


def _split_sequence(derived: Derived) -> Layouts:
    if derived.layouts.decided_by_values:  # a trace of it on real tensors would send what ranks do not agree on
        node = derived.layouts.decided_by_values[0]
        raise CannotSplit(f"values decide the shape of what {node.name} gives ({node.meta.get('source')})")
    try:
        return split_sequence(derived.layouts)
    except CannotSplit as err:
        path = str(err.__cause__.node.target) if isinstance(err.__cause__, LayoutError) else ""
        if path not in derived.reasons:
            raise
        raise CannotSplit(f"{err}; this layer is not split because of this: {derived.reasons[path]}") from err
