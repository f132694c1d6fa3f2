"""Carry out a plan that was derived from the model's own forward, and show that each rank's model is the one meant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx, nn

from slapo_core import Schedule, ScheduleError, TraceError, get_logger, is_sharded, savepoint, split_inputs
from slapo_tracing.nodes import is_opaque, own_forward

from ..rules.norms import counts_channels_only
from ..rules.parametrizations import no_parametrization_in_forward
from ..rules.rulebook import rules_of
from ..rules.sharding_rule import split_of
from ..splitting import attention_heads
from ..splitting.module_paths import ancestors
from ..splitting.shard_planner import ShardPlanner
from ..syncs.sync_hooks import mark_gradients_verified, reduces_gradient, trainable
from .derivation.flat_graphs import TakenName, flat_graph, layer_paths
from .derivation.layer_search import Derived
from .derivation.plan_forwards import local_forwards
from .derivation.plan_search import find_plan
from .derivation.replicated_modules import (
    REMEDY,
    LeftWhole,
    Misfit,
    first_rank_only,
    remaining_reasons,
    tell,
    tell_of_attributes,
    tell_of_opaque,
    without_advice,
)
from .derivation.vocabulary import vocabulary_in
from .dry_run.layouts import Layouts
from .dry_run.split_specs import Split
from .execution import column_inputs
from .execution.direct_parameter_shards import split_parameters
from .execution.module_dicts import unused_entries
from .execution.rng_forks import MixedDraws, forks
from .execution.stacked_experts import fork_stack, split_stack
from .local_sizes.adapted_modules import SharedParameter, communicates, is_inside, partial_parameters
from .local_sizes.local_attributes import Count, Difference, counts, difference, localise
from .local_sizes.local_forward import LocalForward
from .sequence.module_boundaries import marked
from .submodule_plans import split_parts


def apply_derived(
    schedule: Schedule, sequence_parallel: bool = False, vocabulary: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Derive a plan for the module and take its steps.

    Layers that a plan cannot be carried out with stay whole, and so does what is inside a module that cannot be traced.

    Args:
        schedule: Of the module.
        sequence_parallel: Split the sequence between the layers too.
        vocabulary: Paths and styles of the embedding and head that the model names, as far as it does. None for a part of a
            model, of which something is split elsewhere, so that nothing may be split here.

    Returns:
        The steps left to take: ``vocabulary``, or else the one that the graph shows.

    Raises:
        ScheduleError: no example inputs, nothing that can be split, or a sequence that cannot.
        TraceError: the forward of the module itself cannot be a graph.
    """
    steps = {**(vocabulary or {})}
    if schedule.world_size <= 1:
        return steps
    whole, splits_more = LeftWhole(), vocabulary is None or bool(vocabulary)
    try:
        derived = _carried_out(schedule, whole, sequence_parallel, splits_more)
    except (ScheduleError, TraceError) as err:
        may_help = isinstance(err, TraceError | TakenName) or bool(whole.layers)
        if sequence_parallel or not may_help or not split_parts(schedule, _apply_to_part):
            raise
        what = "tensor_parallel: the parts of %s are split each for themselves, as there is no plan for all of it: %s"
        names = schedule.path or type(schedule.mod).__name__, without_advice(err)
        get_logger().warning(what, *names, extra=first_rank_only(schedule))
        return steps
    if [path for path in whole.opaque if split_parts(schedule[path], _apply_to_part)]:
        derived.reasons = remaining_reasons(schedule.mod, derived.reasons)
    if not splits_more and not any(map(is_sharded, schedule.mod.parameters())):
        raise _nothing_split(schedule, derived, sequence_parallel)
    if vocabulary == {}:
        steps = vocabulary_in(derived.layouts, schedule.mod, schedule.world_size, rules_of(schedule))
    if any(_runs_from_graph(schedule.mod, path) for path in steps):
        steps = {}
    tell(schedule, derived, whole.layers, tell_of_opaque(schedule, whole) | {*steps})
    return steps


def _runs_from_graph(model: nn.Module, path: str) -> bool:
    """Return whether a module around a layer runs from a graph, in which the layer is what it was in the plan."""
    return any(isinstance(own_forward(model.get_submodule(outer)), LocalForward) for outer in ancestors(path))


def _carried_out(schedule: Schedule, whole: LeftWhole, sequence_parallel: bool, splits_more: bool) -> Derived:
    """Carry out the first plan that can be; fill ``whole`` with what the ones before could not be carried out with."""
    while True:
        try:
            with savepoint(schedule), no_parametrization_in_forward():  # which an attempt that fails would take for writes
                return carry_out(schedule, whole, sequence_parallel, splits_more or bool(whole.opaque))
        except (ScheduleError, TraceError) as err:
            if sequence_parallel and whole.adapts:
                whole.adapts = False
            elif sequence_parallel and isinstance(err, TraceError):
                message = f"the sequence cannot be split: {without_advice(err)}; without sequence_parallel what can be split is"
                raise _error(schedule, message) from err
            elif sequence_parallel or not _leave_out(schedule, whole, err):
                raise


def _leave_out(schedule: Schedule, whole: LeftWhole, err: Exception) -> bool:
    """Let what a plan could not be carried out with stay whole; return whether there is anything more to leave out."""
    if isinstance(err, Misfit):
        return whole.add_layers(schedule.mod, err)
    return isinstance(err, TraceError) and whole.add_opaque(schedule, err)


def _apply_to_part(schedule: Schedule) -> None:
    apply_derived(schedule)


def carry_out(
    schedule: Schedule,
    whole: LeftWhole,
    sequence_parallel: bool,
    splits_more: bool,
    accept: Callable[[Derived], None] | None = None,
) -> Derived:
    """Derive a plan that leaves some modules whole, and take its steps.

    Args:
        schedule: Of the module.
        whole: The modules.
        sequence_parallel: Split the sequence between the layers too.
        splits_more: Another plan splits something as well, so that this one may split nothing.
        accept: Called with the plan before its steps are taken; raises ``Misfit`` for one that is not meant. Stacks stay whole
            then. None accepts any plan.

    Raises:
        Misfit: it cannot be carried out.
        ScheduleError: nothing can be split, or the sequence cannot.
        TraceError: a forward cannot be a graph.
    """
    size = schedule.world_size
    borders = _borders(schedule) if sequence_parallel else []
    with marked(borders):
        derived = find_plan(schedule, whole, sequence_parallel)
    if accept is not None:
        accept(derived)
    stacks = [path for path in _stacks(schedule, derived) if path not in whole.layers] if accept is None else []
    if not len(derived) and not stacks and (sequence_parallel or not splits_more):
        raise _nothing_split(schedule, derived, sequence_parallel)
    if sequence_parallel and not derived.splits:
        raise _error(schedule, f"the sequence cannot be split: nothing but {stacks[0]!r} and its like is; leave it whole")
    layouts = derived.layouts
    found = counts(layouts, schedule.mod, size)
    for count in found:
        schedule.touch(count.module)
    forwards = local_forwards(schedule, derived)
    for path in stacks:
        split_stack(schedule[path])
    _count_channels(schedule, layouts)
    columns = [path for path, split in derived.splits.items() if _splits(schedule, path, split, layouts.scattered.get(path))]
    columns = [path for path in columns if not layouts.summed.get(path)]
    for paths in column_inputs.by_input(layouts.graph, columns):
        column_inputs.sum_gradients(schedule, paths)
    if not layouts.crossings:
        _split_unused_entries(schedule, derived)
    for (path, mode), crossing in layouts.crossings.items():
        schedule[path].sync(mode, crossing.op, **crossing.arguments())
    for path, (forward, _) in forwards.items():
        if forward.parameters or communicates(layouts, path):
            split_parameters(schedule[path] if path else schedule, forward.parameters)
    with marked(borders):
        from_graph = _count_locally(schedule, derived, found, forwards, stacks)
    _sum_gradients(schedule, derived, from_graph)
    _fork(schedule, derived, from_graph)
    for path in stacks:
        fork_stack(schedule[path])
    tell_of_attributes(schedule, layouts)
    return derived


def _count_channels(schedule: Schedule, layouts: Layouts) -> None:
    """Let norms without weights count the channels of this rank."""
    calls: dict[str, list[fx.Node]] = {}
    for node in layouts.graph.find_nodes(op="call_module"):
        calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
        module, sharded = schedule.mod.get_submodule(path), [node for node in nodes if node in layouts.local]
        if not counts_channels_only(module) or not sharded:
            continue
        if len(sharded) < len(nodes):
            sources = {layer for node in sharded for layer in layouts.sources[node]}
            raise Misfit(schedule, f"{path!r} is given sharded values and whole ones", sources)
        schedule.touch(module)
        vars(module)["num_features"] //= schedule.world_size


def _nothing_split(schedule: Schedule, derived: Derived, sequence_parallel: bool) -> ScheduleError:
    reasons = "; ".join(dict.fromkeys(derived.reasons.values())) or "it has no layers with a sharding rule"
    along = "the sequence cannot be split: " if sequence_parallel else ""
    return _error(schedule, f"{along}nothing of the {type(schedule.mod).__name__} can be split: {reasons}; {REMEDY}")


def _stacks(schedule: Schedule, derived: Derived) -> list[str]:
    """Those that are given whole values and can be split."""
    rules, layouts, found = rules_of(schedule), derived.layouts, []
    for node in layouts.graph.find_nodes(op="call_module"):
        path = str(node.target)
        cut = rules.stack_cut(schedule.mod.get_submodule(path))
        if cut is None or any(value in layouts.local or value in layouts.parts for value in (node, *node.all_input_nodes)):
            continue
        name = cut.main(schedule.mod.get_submodule(path))
        try:
            ShardPlanner(schedule[path], name, cut.dims[name], None).plan()
        except ScheduleError as err:
            derived.reasons[path] = str(err)
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _borders(schedule: Schedule) -> list[tuple[str, nn.Module]]:
    """The modules that a trace goes into."""
    layers = layer_paths(schedule)
    inside = {module for path in layers for module in schedule.mod.get_submodule(path).modules()}
    return [(path, mod) for path, mod in schedule.mod.named_modules() if path and mod not in inside and not is_opaque(mod)]


def _splits(schedule: Schedule, path: str, split: Split, scattered: int | None) -> bool:
    try:
        return _split(schedule[path], split, scattered)
    except ScheduleError as err:
        raise Misfit(schedule, str(err), [path]) from err


def _split(schedule: Schedule, split: Split, scattered: int | None) -> bool:
    """Split a layer; whether the gradient of its input then is partial."""
    cut = rules_of(schedule).layer_cut(schedule.mod, "partial" if split.output == "reduced" else split.output)
    assert cut is not None
    blocks = list(split.blocks) or (1 if cut.fusable else None)
    name = cut.main(schedule.mod)
    schedule.shard(name, axis=cut.dims[name], blocks=blocks, **({"copied": list(split.copied)} if split.copied else {}))
    if scattered is not None:
        schedule.sync("fwd_post", "reduce_scatter", axis=scattered)
    elif split.output == "reduced":
        schedule.sync("fwd_post", "all_reduce")
    return cut.input == "replicated"


def _split_unused_entries(schedule: Schedule, derived: Derived) -> None:
    """Split layers that did not run as those of the same width in the same ``nn.ModuleDict`` that did."""
    for path, split in derived.splits.items():
        for other in unused_entries(schedule.mod, derived.layouts, path):
            applied = split_of(schedule.mod.get_submodule(path))
            assert applied is not None
            module, spec = schedule.mod.get_submodule(other), applied.spec
            same_width = module.get_parameter(applied.cut.main(module)).shape[spec.dim] == spec.full_shape[spec.dim]
            if same_width and _splits(schedule, other, split, None):
                column_inputs.sum_gradients(schedule, [other])


def _sum_gradients(schedule: Schedule, derived: Derived, from_graph: Mapping[str, LocalForward]) -> None:
    """Sum the gradients of parameters that each rank uses on its own part of a value."""
    try:
        partial = partial_parameters(derived.layouts, from_graph)
    except SharedParameter as err:
        raise Misfit(schedule, str(err), err.layers) from err
    for path, forward in from_graph.items():
        start = len(path) + 1 if path else 0
        forward.partial = frozenset(name[start:] for name in partial if is_inside(name, path))
    names_of: dict[str, set[str]] = {}
    for name in sorted(derived.layouts.partial.keys() & partial):
        path, _, own = name.rpartition(".")
        names_of.setdefault(path, set()).add(own)
    for path, names in names_of.items():
        handle = schedule[path] if path else schedule
        held = trainable(handle.mod)
        parameters = {name: each for name, each in held.items() if name in names}
        if not parameters or any(map(reduces_gradient, parameters.values())):  # frozen, or tied to one that is done
            continue
        handle.sync("grad", "all_reduce", **({"of": sorted(parameters)} if held.keys() > parameters.keys() else {}))
        mark_gradients_verified(handle.mod)


def _fork(schedule: Schedule, derived: Derived, from_graph: Collection[str]) -> None:
    try:
        found = list(forks(derived.layouts, from_graph))
    except MixedDraws as err:
        if derived.layouts.crossings:
            raise _error(schedule, f"{err}; set that rate to 0, or give plan= and fork_rng") from err
        raise Misfit(schedule, f"{err}; set that rate to 0", _sources(derived, [err.node])) from err
    found += [(other, outside) for path, outside in found for other in unused_entries(schedule.mod, derived.layouts, path)]
    for path, outside in found:
        (schedule[path] if path else schedule).fork_rng(**({"outside": True} if outside else {}))


def _count_locally(
    schedule: Schedule,
    derived: Derived,
    found: list[Count],
    forwards: Mapping[str, tuple[LocalForward, bool]],
    stacks: list[str],
) -> dict[str, LocalForward]:
    """Let modules count this rank's part: by their attributes where these alone decide, else by graphs with sizes of parts.

    Returns:
        The forwards of those that run from graphs, by path.
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
            if "" in installed:  # all there is runs from one graph
                if not schedule.path:
                    installed[""].prepare(*split_inputs(schedule.example_inputs, schedule.mod))
                return None
            return difference(derived.layouts, flat_graph(schedule, layers), installed)
        except TraceError as err:
            return Difference(str(err), _inside(schedule, err.failing_module or ""))

    for path, (_, must) in forwards.items():
        if must:
            install(path)
    inside = {module for path in installed for module in schedule.mod.get_submodule(path).modules()}
    free = [each for each in found if each.module not in inside]
    wrong = localise(derived.layouts, free, schedule.world_size, problem)
    if wrong is not None and len(installed) < len(forwards):
        what = "tensor_parallel: %s run from graphs with sizes of parts: %s"
        get_logger().debug(what, ", ".join(forwards), wrong.reason)
        for path in forwards.keys() - installed.keys():
            install(path)
        wrong = problem()
    if wrong is not None:
        what = f"a module counts on all heads or all of its width where it has a part: {wrong.reason}"
        if derived.layouts.crossings:
            raise _error(schedule, f"the sequence cannot be split: {what}; leave out sequence_parallel")
        near = [path for path in stacks if wrong.module and (is_inside(path, wrong.module) or is_inside(wrong.module, path))]
        raise Misfit(schedule, what, near or _given_to(derived, wrong.module) or _layers_of(derived, wrong.module) or stacks)
    for module in schedule.mod.modules():
        schedule.touch(module)
    attention_heads.mark_counts_verified(schedule.mod)
    return installed


def _sources(derived: Derived, nodes: Iterable[fx.Node]) -> set[str]:
    """Return the layers whose sharded outputs reach some nodes."""
    layouts, found = derived.layouts, set[str]()
    for node in nodes:
        found |= layouts.branch_of[node].splits(1).keys() if node in layouts.branch_of else layouts.sources.get(node, set())
    return found & {*derived.splits, *derived.parameters}


def _given_to(derived: Derived, path: str) -> set[str]:
    """Return the layers outside of a module that give it sharded values, of which it may count the sizes."""
    found = set[str]()
    for node in derived.layouts.graph.nodes:
        if path and is_inside(node.meta.get("module", ""), path):
            given = (other for other in node.all_input_nodes if not is_inside(other.meta.get("module", ""), path))
            found |= _sources(derived, given)
    return {layer for layer in found if not is_inside(layer, path)}


def _layers_of(derived: Derived, path: str) -> list[str]:
    """Return the layers that are split in a module, else in the innermost one around it in which any is."""
    split = [*derived.splits, *derived.parameters]
    while not (found := [layer for layer in split if is_inside(layer, path)]) and path:
        path = path.rpartition(".")[0]
    return found


def _inside(schedule: Schedule, path: str) -> str:
    """Return a path of the whole model's as one of the schedule's module."""
    return path.removeprefix(f"{schedule.path}.") if schedule.path else path


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="tensor_parallel")
