"""``tensor_parallel``: shard, sync and fork a model by a plan, in one step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import fx

from slapo_core import Primitive, Schedule, ScheduleError, TraceError, get_logger, is_sharded, savepoint
from slapo_tracing.graphs import as_untraced

from .planning.derivation.replicated_modules import first_rank_only, plan_error
from .planning.derivation.vocabulary import vocabulary_steps
from .planning.derived_plan import apply_derived_plan
from .planning.execution import layer_backends, rng_forks
from .planning.execution.held_messages import messages_of_success
from .planning.execution.optional_outputs import ATTENTIONS, HIDDEN_STATES, OptionalOutputGuard
from .planning.execution.plan_steps import fork_stack, group_by_parent, reduce_shared_gradients, split_stack
from .planning.published_plan import (
    BESIDE_SHARDED,
    apply_given_plan,
    first_unplanned_layer,
    head_norms,
    published_plan,
    split_plan_gaps,
    tensor_parallel_plan,
    undeclared_parameters,
)
from .rules.parametrizations import parametrization_of
from .rules.rulebook import describe_class, rules_of
from .rules.sharding_rule import Cut, returns_shard, split_of
from .splitting import attention_heads
from .splitting.module_paths import without_block_numbers
from .splitting.persistent_hooks import trainable
from .syncs import parallel_loss as losses


class TensorParallelPrimitive(Primitive):
    """Split a whole model over the tensor-parallel group: shard, sync and fork the random numbers by a plan.

    Without ``plan``, the plan that Transformers publishes for the model is used; its keys may name modules that this
    configuration lacks. Where there is none, or it does not cover the model, has an unknown style, or does not fit the number
    of ranks, a plan is derived from the model's own forward, which runs once without data on the schedule's ``example_inputs``.
    Layers are sharded in groups whose values fit together, attention is sharded by heads, and attributes that count heads or
    widths become local. The
    rank's model is traced again afterwards and must match the planned one operation by operation. The vocabulary (embedding
    and head) is sharded if each rank gets some of it. Everything else stays replicated. With ``example_inputs``, parts with
    attention that a published plan does not mention, such as a vision tower, get a derived plan each.

    Args:
        plan: ``{path or glob: style}``, see ``slapo_sharding.planning.published_plan``; nothing else is sharded then.
        sequence_parallel: Shard values between the sharded layers along the sequence, dimension 1 of ``[batch, sequence,
            width]``: norms, dropouts and residual sums run on a rank's part of it. The plan is derived, whatever is published.
            The length must be divisible by the number of ranks at every call.
        backend: ``"megatron"``, of slapo-megatron, or a name that another plugin registers. Layers of this engine replace
            those that the plan has sharded, with the same shards of the same parameters. A layer that the engine lacks stays;
            a warning names it. Nothing is replaced on one rank. With ``parallel_loss`` the engine may compute the losses of
            tokens, too, as Megatron does from logits in bfloat16.
        parallel_loss: Compute the loss of a causal language model from each rank's shard of the logits, which are not gathered:
            a call that returns a loss returns None for them.

    Raises:
        ScheduleError: no plan is known or can be derived, an unknown style, a key that matches nothing, an illegal step of the
            plan, a sequence that cannot be split, a backend that is unknown or has none of the layers, or a loss that cannot be
            computed from sharded logits; the model is as before.
        TraceError: a plan has to be derived, but the forward cannot be traced.
    """

    name = "tensor_parallel"
    scope = "module"

    @staticmethod
    def check(
        schedule: Schedule,
        plan: Mapping[str, str] | None = None,
        *,
        sequence_parallel: bool = False,
        backend: str | None = None,
        parallel_loss: bool = False,
    ) -> dict[str, str] | None:
        """Return the path and style of each module of the plan; None if a plan is to be derived."""
        if backend is not None:
            layer_backends.backend_of(schedule, backend)
        if backend is not None and sequence_parallel:
            what = "layers of an engine split values along its own dimension for the sequence, not along dimension 1"
            raise plan_error(schedule, f"{what}; leave out sequence_parallel, or backend")
        with as_untraced(schedule):
            _check_untouched(schedule, plan)
            steps = _steps_of_plan(schedule, plan, sequence_parallel)
            if parallel_loss:
                losses.plan_with_sharded_logits(schedule, _vocabulary(schedule) if steps is None else steps)
            return steps

    @staticmethod
    def apply(
        schedule: Schedule,
        plan: Mapping[str, str] | None = None,
        *,
        sequence_parallel: bool = False,
        backend: str | None = None,
        parallel_loss: bool = False,
        checked: dict[str, str] | None,
    ) -> None:
        """Take the steps of the plan."""
        with as_untraced(schedule):
            before = set(filter(split_of, schedule.mod.modules()))
            _split_or_derive(schedule, checked, plan, sequence_parallel, parallel_loss)
            loss = losses.install_loss(schedule) if parallel_loss else None
            if backend is not None:
                layer_backends.replace_layers(schedule, backend, layer_backends.backend_of(schedule, backend), before, loss)


def _split_or_derive(
    schedule: Schedule,
    steps: dict[str, str] | None,
    plan: Mapping[str, str] | None,
    sequence_parallel: bool,
    parallel_loss: bool,
) -> None:
    """Apply a plan. Where a published one does not fit the ranks, as with too few heads, derive one instead.

    A published plan that gathers the values between its layers, as Phi-3's, is the second choice: every rank would compute the
    whole attention.
    """
    if steps is None or plan is not None or schedule.example_inputs is None or schedule.world_size == 1:
        _split(schedule, steps, plan, sequence_parallel, parallel_loss)
        return
    choices = [None, steps] if "rowwise_split_input" in steps.values() else [steps, None]
    refusals: list[ScheduleError | TraceError] = []
    for choice in choices:
        try:
            with messages_of_success(), savepoint(schedule):
                _split(schedule, choice, plan, sequence_parallel, parallel_loss)
                if choice is None and choice is choices[0] and (path := _first_whole(schedule, steps)):
                    raise plan_error(schedule, f"a derived plan leaves {path!r} whole, which the published one splits")
            return
        except (ScheduleError, TraceError) as err:
            refusals.append(err)
            get_logger().debug("tensor_parallel(%r): a plan does not fit: %s", schedule.path, err)
    raise refusals[choices.index(steps)]


def _first_whole(schedule: Schedule, steps: Mapping[str, str]) -> str | None:
    """Return the first module that a plan splits and that is whole."""
    for path in (path for path, style in steps.items() if "colwise" in style or "rowwise" in style):
        parameters = [*schedule.mod.get_submodule(path).parameters()]
        if parameters and not any(map(is_sharded, parameters)):
            return path
    return None


def _split(
    schedule: Schedule,
    steps: dict[str, str] | None,
    plan: Mapping[str, str] | None,
    sequence_parallel: bool,
    parallel_loss: bool,
) -> None:
    """Apply a plan; without ``steps``, derive one first."""
    derived = steps is None
    if steps is None:
        steps = apply_derived_plan(schedule, sequence_parallel, _vocabulary(schedule))
    elif plan is not None and (shown := apply_given_plan(schedule, steps)):
        steps = {path: style for path, style in steps.items() if path not in shown}
        derived = True
    if parallel_loss:
        steps = losses.plan_with_sharded_logits(schedule, steps)
    columns = [path for path, style in steps.items() if STYLES[style](schedule[path] if path else schedule)]
    for paths in group_by_parent(columns):
        reduce_shared_gradients(schedule, paths)
    if schedule.world_size > 1 and not derived:
        rng_forks.fork_dropouts(schedule, (path for path, style in steps.items() if style in BESIDE_SHARDED))
        if plan is None:
            split_plan_gaps(schedule)
    if schedule.world_size > 1:  # refuse later requests for optional outputs that are sharded
        attentions = filter(attention_heads.is_attention, schedule.mod.modules())
        split = any(returns_shard(inside) for attention in attentions for inside in attention.modules())
        extras = (*((HIDDEN_STATES,) if sequence_parallel else ()), *((ATTENTIONS,) if split else ()))
        if extras:
            schedule.mod.register_forward_hook(OptionalOutputGuard(schedule.path, extras), with_kwargs=True)


def _vocabulary(schedule: Schedule) -> dict[str, str]:
    return dict(vocabulary_steps(schedule.mod, max(schedule.world_size, 1), rules_of(schedule)))


def _check_untouched(schedule: Schedule, plan: Mapping[str, str] | None) -> None:
    """Refuse a model whose own recomputation has put a hook on it, and, without a plan, one that is sharded already."""
    inside = dict(schedule.mod.named_modules())
    split = [path for path, module in inside.items() if any(map(is_sharded, module._parameters.values()))]
    above: Schedule | None = schedule
    while above is not None and "tensor_parallel" not in above.metadata.primitives:
        above = above.parent
    hooked = next((path for path, module in inside.items() if module._forward_hooks), None)
    if hooked is not None and any(getattr(module, "gradient_checkpointing", False) for module in inside.values()):
        what = f"the model recomputes by itself, which has put a hook on {hooked!r} that would see a part only"
        remedy = "take it without gradient_checkpointing_enable(), and call checkpoint() on its layers afterwards"
        raise plan_error(schedule, f"{what}; {remedy}")
    if plan is None and split:
        what = f"{split[0]!r} is sharded already; call tensor_parallel before shard, or give plan= for what is still whole"
        if above is not None:
            what = f"already tensor-parallel, {split[0]!r} is split; undo that step first, or shard by hand what it left whole"
        raise plan_error(schedule, what)


def _steps_of_plan(schedule: Schedule, plan: Mapping[str, str] | None, sequence_parallel: bool) -> dict[str, str] | None:
    """Return the steps of a plan that is given or published; None if one can be derived instead."""
    if sequence_parallel:
        _check_derivable(schedule, plan)
        return None
    try:
        return _steps(schedule, plan)
    except ScheduleError:
        derivable = plan is None and not isinstance(schedule.mod, fx.GraphModule)
        if not derivable or schedule.example_inputs is None:
            raise
        _warn_of_unknown_style(schedule)
        return None


def _warn_of_unknown_style(schedule: Schedule) -> None:
    """Warn that a published plan is not used because it has an unknown style, as the plan of a newer Transformers may."""
    for key, style in published_plan(schedule.mod).items():
        if style not in STYLES:
            message = (
                "tensor_parallel(%r): the published plan gives %r the style %r, which is not supported; one is derived instead"
            )
            get_logger().warning(message, schedule.path, key, style, extra=first_rank_only(schedule))
            return


def _check_derivable(schedule: Schedule, plan: Mapping[str, str] | None) -> None:
    error = partial(plan_error, schedule)
    if plan is not None:
        raise error("a plan that splits the sequence is derived from the model; leave out plan, or sequence_parallel")
    if isinstance(schedule.mod, fx.GraphModule):
        raise error("the model's graph was rewritten; call tensor_parallel before trace")
    if schedule.example_inputs is None:
        raise error("where the sequence can be split shows when the model runs; give example_inputs to create_schedule")


def _plan_problem(plan: Any) -> str | None:
    """Return why a plan is not a mapping from paths to styles, or None."""
    known = f"give {{path or glob: style}}, styles: {', '.join(STYLES)}"
    if not isinstance(plan, Mapping):
        return f"plan is {plan!r}; {known}"
    for key, style in plan.items():
        if not isinstance(key, str) or not isinstance(style, str):
            return f"{key!r} has the style {style!r}; {known}"
        if style not in STYLES:
            hint = f"{_guess(style, STYLES)}supported: {', '.join(STYLES)}"
            return f"{key!r} has the style {style!r}, which is not supported; {hint}"
    return None


def _steps(schedule: Schedule, plan: Mapping[str, str] | None) -> dict[str, str]:
    """Return the path of every sharded module with its style; raise ``ScheduleError`` if no plan is known, or none fits."""
    error = partial(plan_error, schedule)

    known = published_plan if schedule.example_inputs is not None else tensor_parallel_plan
    given = known(schedule.mod) if plan is None else plan
    if problem := _plan_problem(given):
        raise error(problem)
    steps: dict[str, str] = {}
    stacked: dict[str, str] = {}
    for key, style in given.items():
        found = _match(schedule, key)
        owners = _match(schedule, key, parameter=True) if not found else []
        if not found and not owners and plan is not None:
            like = {without_block_numbers(path) if "*" in key else path for path, _ in schedule.mod.named_modules()}
            hint = f"{_guess(key, like)}give a path or glob below {schedule.path or 'the model'!r}"
            raise error(f"the plan's {key!r} matches no module; {hint}")
        steps.update(dict.fromkeys(found, style))
        stacked.update(dict.fromkeys(owners, key))
    for path, key in stacked.items():
        if steps.get(path) != "moe_tp_experts":
            raise error(f"{key!r} is a parameter of {path!r}, which has no style 'moe_tp_experts'; give the module a style")
    if not steps and isinstance(schedule.mod, fx.GraphModule):
        raise error("its graph was rewritten, and its plan is found on the model itself; call tensor_parallel before trace")
    if not steps:
        raise error(
            f"no plan is known for {type(schedule.mod).__name__}; give example_inputs to create_schedule, from which one is "
            f"derived, or plan={{path or glob: style}}, styles: {', '.join(STYLES)}"
        )
    if plan is None:
        steps.update(dict.fromkeys(head_norms(schedule.mod, steps), "replicated_with_grad_allreduce"))
        if wrapper := next(_layers_without_rule(schedule, steps), None):
            module = schedule.mod.get_submodule(wrapper)
            hint = "give example_inputs to create_schedule, from which a plan is derived, or plan="
            why = f"a {describe_class(module)}, which no sharding rule covers"
            if computed := parametrization_of(module):
                why = f"whose {computed}, and a part of it does not follow from parts"
            raise error(f"the published plan splits {wrapper!r}, {why}; {hint}")
        if undeclared := undeclared_parameters(schedule.mod, steps):
            what = f"{undeclared[0]!r} may be used on sharded or on replicated values"
            raise error(f"{what}, the published plan is silent; give plan=")
        if schedule.example_inputs is not None and (left := first_unplanned_layer(schedule.mod, steps, rules_of(schedule))):
            raise error(f"the published plan splits experts and leaves {left!r} whole; give plan=")
        steps.update(_vocabulary(schedule))
    return steps


def _layers_without_rule(schedule: Schedule, steps: Mapping[str, str]) -> Iterator[str]:
    """Yield the layers of a plan that no sharding rule splits as planned, such as adapters around projections."""
    rules = rules_of(schedule)
    ways = {True: ("sharded", "partial"), False: ("replicated", "sharded")}
    planned = ((path, style.endswith("rowwise")) for path, style in steps.items() if style in BESIDE_SHARDED)
    return (path for path, rows in planned if not any(rules.cuts_between(schedule.mod.get_submodule(path), *ways[rows])))


def _guess(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _match(schedule: Schedule, key: str, *, parameter: bool = False) -> list[str]:
    """Return the paths of the modules that a key matches, or of those whose parameter it matches."""
    path, _, name = key.rpartition(".") if parameter else (key, "", "")
    try:
        found = schedule.select(path)
    except ScheduleError:
        return []
    if parameter:
        found = [handle for handle in found if name in handle.mod._parameters]
    start = len(schedule.path) + 1 if schedule.path else 0
    return [handle.path[start:] for handle in found]


def _colwise(schedule: Schedule, *, gathered: bool = False, blocks: int | None = None) -> bool:
    owner = schedule.parent.mod if schedule.parent is not None else None
    if blocks is None and attention_heads.fused_blocks(owner, schedule.name, 0) is None:
        blocks = 1  # published plans name only layers whose plain split does not mix blocks
    cut = _cut(schedule, "replicated", "sharded")
    name = cut.main_parameter(schedule.mod)
    schedule.shard(name, axis=cut.dims[name], blocks=blocks, gathered=gathered, uneven=cut.uneven)
    if gathered:
        schedule.sync("fwd_post", "all_gather", axis=cut.dim)
    return True


def _rowwise(schedule: Schedule, *, split: bool = False, blocks: int | None = None) -> bool:
    cut = _cut(schedule, "sharded", "partial")
    name = cut.main_parameter(schedule.mod)
    if split:
        schedule.sync("fwd_pre", "scatter", axis=cut.dim)
    schedule.shard(name, axis=cut.dims[name], blocks=blocks, uneven=cut.uneven)
    schedule.sync("fwd_post", "all_reduce")
    return False


def _experts(schedule: Schedule) -> bool:
    _cut(schedule, "replicated", "partial")
    split_stack(schedule)
    fork_stack(schedule)
    return False


def _embedding_rowwise(schedule: Schedule) -> bool:
    schedule.shard("weight", axis=0, uneven=True)
    schedule.sync("fwd_post", "all_reduce")
    return False


def _reduce_gradients(schedule: Schedule) -> bool:
    for _, handle in schedule.named_schedules():
        if trainable(handle.mod):
            handle.sync("grad", "all_reduce")
    return False


STYLES: dict[str, Callable[[Schedule], bool]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": partial(_colwise, gathered=True),
    "rowwise_split_input": partial(_rowwise, split=True),
    "embedding_rowwise": _embedding_rowwise,
    "replicated_with_grad_allreduce": _reduce_gradients,
    "packed_colwise": partial(_colwise, blocks=2),
    "packed_rowwise": partial(_rowwise, blocks=2),
    "moe_tp_experts": _experts,
}
"""Style to its steps, which return True if the gradient of the module's input is then partial and not yet reduced."""


def _cut(schedule: Schedule, input: str, output: str) -> Cut:
    for cut in rules_of(schedule).cuts_between(schedule.mod, input, output):
        return cut
    message = f"no sharding rule splits a {describe_class(schedule.mod)} this way; take it out of the plan"
    if computed := parametrization_of(schedule.mod):
        message = f"its {computed}, and a part of it does not follow from parts; take the layer out of the plan"
    raise plan_error(schedule, message)
