"""Application of a plan derived from the model's own forward, and the check that each rank's model equals the dry run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from torch import fx, nn

from slapo_core import Schedule, ScheduleError, TraceError, get_logger, is_sharded, savepoint, split_inputs
from slapo_tracing.nodes import is_opaque, own_forward

from ..rules.channels import counts_channels_only
from ..rules.parametrizations import no_parametrization_in_forward
from ..rules.rulebook import rules_of
from ..rules.sharding_rule import split_of
from ..splitting import attention_heads
from ..splitting.module_paths import ancestors
from ..splitting.persistent_hooks import mark_gradients_verified, reduces_gradient, trainable
from ..splitting.shard_planner import ShardPlanner
from .derivation.flat_graphs import ReservedNameError, flat_graph, layer_paths
from .derivation.layer_search import DerivedPlan
from .derivation.plan_search import find_plan, make_local_forwards
from .derivation.replicated_modules import (
    REMEDY,
    PlanConflict,
    ReplicatedModules,
    first_rank_only,
    log_opaque,
    log_replicated,
    log_sharded_attributes,
    plan_error,
    remaining_reasons,
    without_trace_advice,
)
from .derivation.vocabulary import vocabulary_steps_from_graph
from .dry_run.layouts import Layouts
from .dry_run.node_values import calls_by_path
from .dry_run.split_specs import LayerSplit
from .execution.block_repetition import derive_once
from .execution.plan_steps import (
    fork_stack,
    group_by_input,
    reduce_shared_gradients,
    split_parameters,
    split_stack,
    unused_entries,
)
from .execution.rng_forks import MixedRandomOps, find_rng_forks
from .local_sizes.adapted_modules import SharedParameterError, communicates, is_inside, partial_parameters
from .local_sizes.local_attributes import Difference, SizeAttribute, candidate_attributes, difference, make_attributes_local
from .local_sizes.local_forward import LocalForward
from .sequence.module_boundaries import mark_boundaries
from .submodule_plans import split_submodules


def apply_derived_plan(
    schedule: Schedule, sequence_parallel: bool = False, vocabulary: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Derive a plan for the module and apply its steps.

    Layers whose split is not feasible stay whole, and so do the layers inside a module that cannot be traced. Of many equal
    blocks few are looked at, and the others get their steps.

    Args:
        schedule: Schedule of the module.
        sequence_parallel: Split the sequence between the layers too.
        vocabulary: Paths and styles of the named embedding and head. None for a submodule of a model with splits elsewhere, so
            that this plan may split nothing.

    Returns:
        Steps left to take: ``vocabulary``, or those that the graph shows.

    Raises:
        ScheduleError: there are no example inputs, nothing can be split, or the sequence cannot.
        TraceError: the forward of the module itself cannot be a graph.
    """
    if schedule.world_size <= 1:
        return {**(vocabulary or {})}
    return derive_once(schedule, partial(_apply_derived_plan, schedule, sequence_parallel, vocabulary))


def _apply_derived_plan(
    schedule: Schedule, sequence_parallel: bool, vocabulary: Mapping[str, str] | None, is_part: bool = False
) -> dict[str, str]:
    """Derive a plan and apply it; with ``is_part``, some blocks are left out, and a model that does not run is an error."""
    steps = {**(vocabulary or {})}
    replicated, splits_more = ReplicatedModules(), vocabulary is None or bool(vocabulary)
    try:
        derived = _first_feasible_plan(schedule, replicated, sequence_parallel, splits_more, is_part)
    except (ScheduleError, TraceError) as err:
        may_help = isinstance(err, TraceError | ReservedNameError) or bool(replicated.layers)
        if sequence_parallel or is_part or not may_help or not split_submodules(schedule, apply_derived_plan):
            raise
        what = "tensor_parallel: the submodules of %s are split one by one, as there is no plan for the whole: %s"
        names = schedule.path or type(schedule.mod).__name__, without_trace_advice(err)
        get_logger().warning(what, *names, extra=first_rank_only(schedule))
        return steps
    if [path for path in replicated.opaque if split_submodules(schedule[path], apply_derived_plan)]:
        derived.reasons = remaining_reasons(schedule.mod, derived.reasons)
    if not splits_more and not any(map(is_sharded, schedule.mod.parameters())):
        raise _nothing_split_error(schedule, derived, sequence_parallel)
    if vocabulary == {}:
        steps = vocabulary_steps_from_graph(derived.layouts, schedule.mod, schedule.world_size, rules_of(schedule))
    outer = {each for path in steps for each in ancestors(path)}
    if any(isinstance(own_forward(schedule.mod.get_submodule(path)), LocalForward) for path in outer):
        steps = {}  # in the graph, the layers are as planned
    log_replicated(schedule, derived, replicated.layers, log_opaque(schedule, replicated) | {*steps})
    return steps


def _first_feasible_plan(
    schedule: Schedule, replicated: ReplicatedModules, sequence_parallel: bool, splits_more: bool, is_part: bool = False
) -> DerivedPlan:
    """Apply the first feasible plan; fill ``replicated`` with what made the plans before infeasible."""
    while True:
        try:
            # parametrizations of a failed attempt would look like writes of the forward
            with savepoint(schedule), no_parametrization_in_forward():
                return apply_plan(schedule, replicated, sequence_parallel, splits_more or bool(replicated.opaque))
        except (ScheduleError, TraceError) as err:
            if is_part and isinstance(err, TraceError):
                raise
            if sequence_parallel and replicated.adapts:
                replicated.adapts = False
            elif sequence_parallel and isinstance(err, TraceError):
                message = f"the sequence cannot be split: {without_trace_advice(err)}; leave out sequence_parallel"
                raise plan_error(schedule, message) from err
            elif sequence_parallel or not replicated.add(schedule, err):
                raise


def apply_plan(
    schedule: Schedule,
    replicated: ReplicatedModules,
    sequence_parallel: bool,
    splits_more: bool,
    accept: Callable[[DerivedPlan], None] | None = None,
) -> DerivedPlan:
    """Derive a plan that leaves some modules whole, and apply its steps.

    Args:
        schedule: Schedule of the module.
        replicated: Modules that stay whole.
        sequence_parallel: Split the sequence between the layers too.
        splits_more: Another plan splits something as well, so that this one may split nothing.
        accept: Called with the plan before its steps, raises ``PlanConflict`` to reject it. Stacks stay whole then. None
            accepts every plan.

    Raises:
        PlanConflict: the plan is not feasible.
        ScheduleError: nothing can be split, or the sequence cannot.
        TraceError: a forward cannot be a graph.
    """
    size = schedule.world_size
    borders = _boundary_modules(schedule) if sequence_parallel else []
    with mark_boundaries(borders):
        derived = find_plan(schedule, replicated, sequence_parallel)
    if accept is not None:
        accept(derived)
    stacks = [path for path in _stacks(schedule, derived) if path not in replicated.layers] if accept is None else []
    if not len(derived) and not stacks and (sequence_parallel or not splits_more):
        raise _nothing_split_error(schedule, derived, sequence_parallel)
    if sequence_parallel and not derived.splits:
        raise plan_error(schedule, f"the sequence cannot be split: only {stacks[0]!r} and its like are split; leave them whole")
    layouts = derived.layouts
    found = candidate_attributes(layouts, schedule.mod, size)
    for count in found:
        schedule.touch(count.module)
    # local forwards copy their modules, whose layers must still be whole
    forwards = make_local_forwards(schedule, derived)
    for path in stacks:
        split_stack(schedule[path])
    _set_local_channels(schedule, layouts)
    axes = layouts.scatter_axes
    columns = [path for path, split in derived.splits.items() if _split_layer(schedule, path, split, axes.get(path))]
    columns = [path for path in columns if not layouts.input_gradient_reduced.get(path)]
    for paths in group_by_input(layouts.graph, columns):
        reduce_shared_gradients(schedule, paths)
    if not layouts.sequence_collectives:
        _split_unused_entries(schedule, derived)
    for (path, mode), collective in layouts.sequence_collectives.items():
        schedule[path].sync(mode, collective.op, **collective.arguments())
    for path, (forward, _) in forwards.items():
        if forward.parameters or communicates(layouts, path):
            split_parameters(schedule[path] if path else schedule, forward.parameters)
    with mark_boundaries(borders):
        from_graph = _install_local_sizes(schedule, derived, found, forwards, stacks)
    _reduce_gradients(schedule, derived, from_graph)
    _fork_random_numbers(schedule, derived, from_graph)
    for path in stacks:
        fork_stack(schedule[path])
    log_sharded_attributes(schedule, layouts)
    return derived


def _set_local_channels(schedule: Schedule, layouts: Layouts) -> None:
    """Set the channel counts of norms without weights to those of this rank."""
    for path, nodes in calls_by_path(layouts.graph).items():
        module, sharded = schedule.mod.get_submodule(path), [node for node in nodes if node in layouts.local_shapes]
        if not counts_channels_only(module) or not sharded:
            continue
        if len(sharded) < len(nodes):
            sources = {layer for node in sharded for layer in layouts.sources[node]}
            raise PlanConflict(schedule, f"{path!r} has sharded inputs and whole ones", sources)
        schedule.touch(module)
        vars(module)["num_features"] //= schedule.world_size


def _nothing_split_error(schedule: Schedule, derived: DerivedPlan, sequence_parallel: bool) -> ScheduleError:
    reasons = "; ".join(dict.fromkeys(derived.reasons.values())) or "it has no layers with a sharding rule"
    along = "the sequence cannot be split: " if sequence_parallel else ""
    return plan_error(schedule, f"{along}nothing of the {type(schedule.mod).__name__} can be split: {reasons}; {REMEDY}")


def _stacks(schedule: Schedule, derived: DerivedPlan) -> list[str]:
    """Return the stacked experts with whole inputs and outputs that can be split."""
    rules, layouts, found = rules_of(schedule), derived.layouts, []
    for node in layouts.graph.find_nodes(op="call_module"):
        path = str(node.target)
        cut = rules.stack_cut(schedule.mod.get_submodule(path))
        values = {node, *node.all_input_nodes}
        if cut is None or values & layouts.local_shapes.keys() or values & layouts.partial_gradients.keys():
            continue
        name = cut.main_parameter(schedule.mod.get_submodule(path))
        try:
            ShardPlanner(schedule[path], name, cut.dims[name], None).plan()
        except ScheduleError as err:
            derived.reasons[path] = str(err)
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _boundary_modules(schedule: Schedule) -> list[tuple[str, nn.Module]]:
    """Return the modules whose boundaries a trace marks: those that it inlines."""
    layers = layer_paths(schedule)
    inside = {module for path in layers for module in schedule.mod.get_submodule(path).modules()}
    return [(path, mod) for path, mod in schedule.mod.named_modules() if path and mod not in inside and not is_opaque(mod)]


def _split_layer(schedule: Schedule, path: str, split: LayerSplit, scattered: int | None) -> bool:
    """Split a layer; return whether the gradient of its input is partial then. Raises ``PlanConflict`` for an illegal step."""
    handle = schedule[path]
    cut = rules_of(schedule).layer_cut(handle.mod, "partial" if split.output == "reduced" else split.output)
    assert cut is not None
    blocks = list(split.blocks) or (1 if cut.fusable else None)
    name = cut.main_parameter(handle.mod)
    try:
        handle.shard(name, axis=cut.dims[name], blocks=blocks, **({"copied": [*split.replicated]} if split.replicated else {}))
        if scattered is not None:
            handle.sync("fwd_post", "reduce_scatter", axis=scattered)
        elif split.output == "reduced":
            handle.sync("fwd_post", "all_reduce")
    except ScheduleError as err:
        raise PlanConflict(schedule, str(err), [path]) from err
    return cut.input == "replicated"


def _split_unused_entries(schedule: Schedule, derived: DerivedPlan) -> None:
    """Split layers of an ``nn.ModuleDict`` that did not run, like those of the same width that did."""
    for path, split in derived.splits.items():
        for other in unused_entries(schedule.mod, derived.layouts, path):
            applied = split_of(schedule.mod.get_submodule(path))
            assert applied is not None
            module, spec = schedule.mod.get_submodule(other), applied.spec
            same_width = module.get_parameter(applied.cut.main_parameter(module)).shape[spec.dim] == spec.full_shape[spec.dim]
            if same_width and _split_layer(schedule, other, split, None):
                reduce_shared_gradients(schedule, [other])


def _reduce_gradients(schedule: Schedule, derived: DerivedPlan, from_graph: Mapping[str, LocalForward]) -> None:
    """Reduce the gradients of replicated parameters that each rank uses on its shard of a value."""
    try:
        partial = partial_parameters(derived.layouts, from_graph)
    except SharedParameterError as err:
        raise PlanConflict(schedule, str(err), err.layers) from err
    for path, forward in from_graph.items():
        start = len(path) + 1 if path else 0
        forward.partial = frozenset(name[start:] for name in partial if is_inside(name, path))
    names_of: dict[str, set[str]] = {}
    for name in sorted(derived.layouts.partial_parameters.keys() & partial):
        path, _, own = name.rpartition(".")
        names_of.setdefault(path, set()).add(own)
    for path, names in names_of.items():
        handle = schedule[path] if path else schedule
        held = trainable(handle.mod)
        parameters = {name: each for name, each in held.items() if name in names}
        # frozen, or tied to a parameter whose gradient is reduced
        if not parameters or any(map(reduces_gradient, parameters.values())):
            continue
        handle.sync("grad", "all_reduce", **({"of": sorted(parameters)} if held.keys() > parameters.keys() else {}))
        mark_gradients_verified(handle.mod)


def _fork_random_numbers(schedule: Schedule, derived: DerivedPlan, from_graph: Collection[str]) -> None:
    try:
        found = list(find_rng_forks(derived.layouts, from_graph))
    except MixedRandomOps as err:
        if derived.layouts.sequence_collectives:
            raise plan_error(schedule, f"{err}; set that rate to 0, or give plan= and call fork_rng") from err
        raise PlanConflict(schedule, f"{err}; set that rate to 0", _sources(derived, [err.node])) from err
    found += [(other, outside) for path, outside in found for other in unused_entries(schedule.mod, derived.layouts, path)]
    for path, outside in found:
        (schedule[path] if path else schedule).fork_rng(**({"outside": True} if outside else {}))


def _install_local_sizes(
    schedule: Schedule,
    derived: DerivedPlan,
    found: list[SizeAttribute],
    forwards: Mapping[str, tuple[LocalForward, bool]],
    stacks: list[str],
) -> dict[str, LocalForward]:
    """Let modules use local sizes: by their attributes where these suffice, else by graphs with local sizes.

    Returns:
        Forwards of the modules that run from graphs, by path.
    """
    layers = [*layer_paths(schedule), *derived.layouts.opaque]
    installed: dict[str, LocalForward] = {}

    def install(path: str) -> None:
        for module in schedule.mod.get_submodule(path).modules():
            schedule.touch(module)
        installed[path] = forwards[path][0]
        installed[path].install()

    def problem() -> Difference | None:
        try:
            if "" in installed:  # the whole module runs from one graph
                if not schedule.path:
                    installed[""].prepare(*split_inputs(schedule.example_inputs, schedule.mod))
                return None
            return difference(derived.layouts, flat_graph(schedule, layers), installed)
        except TraceError as err:
            return Difference(str(err), (err.failing_module or "").removeprefix(f"{schedule.path}." if schedule.path else ""))

    for path, (_, must) in forwards.items():
        if must:
            install(path)
    inside = {module for path in installed for module in schedule.mod.get_submodule(path).modules()}
    free = [each for each in found if each.module not in inside]
    wrong = make_attributes_local(derived.layouts, free, schedule.world_size, problem)
    if wrong is not None and len(installed) < len(forwards):
        what = "tensor_parallel: %s run from graphs with local sizes: %s"
        get_logger().debug(what, ", ".join(forwards), wrong.reason)
        for path in forwards.keys() - installed.keys():
            install(path)
        wrong = problem()
    if wrong is not None:
        what = f"a module uses the number of all heads or its whole width on a shard: {wrong.reason}"
        if derived.layouts.sequence_collectives:
            raise plan_error(schedule, f"the sequence cannot be split: {what}; leave out sequence_parallel")
        at = wrong.module
        near = [path for path in stacks if at and (is_inside(path, at) or is_inside(at, path))]
        raise PlanConflict(schedule, what, near or _layers_feeding(derived, at) or _layers_of(derived, at) or stacks)
    for module in schedule.mod.modules():
        schedule.touch(module)
    attention_heads.mark_counts_verified(schedule.mod)
    return installed


def _sources(derived: DerivedPlan, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the layers whose sharded outputs reach some nodes."""
    layouts, found = derived.layouts, set[str]()
    for node in nodes:
        found |= layouts.branch_of[node].splits(1).keys() if node in layouts.branch_of else layouts.sources.get(node, set())
    return found & {*derived.splits, *derived.parameters}


def _layers_feeding(derived: DerivedPlan, path: str) -> set[str]:
    """Return the layers outside of a module whose sharded outputs enter it, as it may use their whole sizes."""
    found = set[str]()
    for node in derived.layouts.graph.nodes:
        if path and is_inside(node.meta.get("module", ""), path):
            given = (other for other in node.all_input_nodes if not is_inside(other.meta.get("module", ""), path))
            found |= _sources(derived, given)
    return {layer for layer in found if not is_inside(layer, path)}


def _layers_of(derived: DerivedPlan, path: str) -> list[str]:
    """Return the split layers in a module, else in the innermost module around it that has any."""
    split = [*derived.splits, *derived.parameters]
    while not (found := [layer for layer in split if is_inside(layer, path)]) and path:
        path = path.rpartition(".")[0]
    return found
