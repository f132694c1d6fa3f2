"""Tensor-parallel plans that are given, by the model or by the user, as ``{path or glob: style}``.

The styles are those Transformers publishes in ``base_model_tp_plan``:

    colwise                        output sharded, input replicated
    rowwise                        input sharded, output replicated
    colwise_gather_output          output gathered: input and output replicated
    rowwise_split_input            input cut first: input and output replicated
    embedding_rowwise              vocabulary split over the ranks
    packed_colwise, packed_rowwise like colwise and rowwise; the split dimension has two equal parts, such as gate and up
    moe_tp_experts                 stacked experts, each split along its inner width; the output is reduced. Styles of their
                                   single parameters are ignored
    replicated_with_grad_allreduce parameters are whole but used on sharded values, so their gradients are reduced:
                                   ``sync("grad", "all_reduce")``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import fx, nn

from slapo_core import Schedule, ScheduleError, TraceError, get_logger, is_sharded, savepoint

from ..rules.layers import is_conv1d
from ..rules.rulebook import Rulebook
from ..splitting import attention_heads
from ..splitting.module_paths import ancestors, without_block_numbers
from .derivation.flat_graphs import layer_paths
from .derivation.layer_search import DerivedPlan
from .derivation.replicated_modules import PlanConflict, ReplicatedModules, first_rank_only, log_replicated_attentions
from .derivation.vocabulary import vocabulary_modules
from .derived_plan import apply_derived_plan, apply_plan
from .dry_run.layout_records import NOT_DIVISIBLE

BESIDE_SHARDED = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
"""Styles of modules with sharded inputs or outputs: parameters beside them may meet sharded values."""


def tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that Transformers publishes for a model, or one for GPT-2's structure; empty for neither.

    The vocabulary's embedding and head are not part of it (see ``vocabulary.py``).
    """
    return published_plan(model) or gpt2_plan(model)


def published_plan(model: Any) -> dict[str, str]:
    """Return the plan that Transformers publishes for a model, with keys relative to the model."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    outside = {path for path, module in model.named_modules() if module in vocabulary_modules(model)}
    return {key: style for key, style in plan.items() if key not in outside}


def gpt2_plan(model: nn.Module) -> dict[str, str]:
    """Return a plan for models like GPT-2, recognized by their Conv1D layers ``c_attn``/``c_proj`` and ``c_fc``/``c_proj``."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        children = {name for name, child in module.named_children() if is_conv1d(child)}
        into = children & {"c_attn", "q_attn", "c_fc"}
        if into and "c_proj" in children:
            prefix = f"{path}." if path else ""
            plan.update({f"{prefix}{name}": "colwise" for name in sorted(into)})
            plan[f"{prefix}c_proj"] = "rowwise"
    return plan


def undeclared_parameters(model: nn.Module, steps: Mapping[str, str]) -> list[str]:
    """Return the names of parameters in the same module as split layers, without a style of their own.

    Their gradients are partial if they are used on sharded values, as a scale per head is. Only the module's code knows.
    """
    owners = {path.rpartition(".")[0] for path, style in steps.items() if style in BESIDE_SHARDED}
    found = []
    for owner in sorted(owners):
        for name, _ in model.get_submodule(owner).named_parameters(owner):
            if steps.keys().isdisjoint(ancestors(name)):
                found.append(name)
    return found


def first_unplanned_layer(model: nn.Module, steps: Mapping[str, str], rules: Rulebook) -> str | None:
    """Return the first layer without a style in a plan that splits experts: many leave attention or a shared expert whole."""
    heads = vocabulary_modules(model)
    layers = (path for path, module in model.named_modules() if rules.is_layer(module) and module not in heads)
    return next((path for path in layers if path not in steps), None) if "moe_tp_experts" in steps.values() else None


def head_norms(model: nn.Module, steps: Mapping[str, str]) -> Iterator[str]:
    """Yield the norms of single heads without a style in a plan that splits the heads; each rank norms its own heads."""
    for name in undeclared_parameters(model, steps):
        path = name.rpartition(".")[0]
        owner, _, child = path.rpartition(".")
        heads = any(f"{owner}.{other}" in steps for other in attention_heads.PROJECTIONS)
        if heads and attention_heads.norms_heads(model.get_submodule(owner), child):
            yield path


def apply_given_plan(schedule: Schedule, steps: Mapping[str, str]) -> set[str]:
    """Split the layers of a given plan like those of a derived plan, if the model's own forward verifies it.

    Whole sizes in the code are then divided, fused projections are split block by block, and the gradients of parameters that
    meet sharded values are reduced. All other layers stay whole. Steps of styles for layers that gather, scatter or reduce by
    themselves are left to the caller.

    Returns:
        The paths that were applied: all, or none. The module is unchanged then.
    """
    done = {path for path, style in steps.items() if style in (*BESIDE_SHARDED, "replicated_with_grad_allreduce")}
    traced = schedule.world_size > 1 and schedule.example_inputs is not None and not isinstance(schedule.mod, fx.GraphModule)
    split = any(is_sharded(value) for value in schedule.mod.parameters())
    if not traced or split or "moe_tp_experts" in steps.values():
        return set()
    styles = {path: steps[path] for path in done if steps[path] in BESIDE_SHARDED}
    outputs = {path: "sharded" if style.endswith("colwise") else "reduced" for path, style in styles.items()}
    if not outputs:
        return set()
    replicated = ReplicatedModules({path: "the plan leaves it out" for path in layer_paths(schedule) if path not in outputs})
    try:
        with savepoint(schedule):
            check = partial(_check_outputs, schedule, outputs)
            apply_plan(schedule, replicated, sequence_parallel=False, splits_more=True, accept=check)
        return done
    except (ScheduleError, TraceError) as err:
        reason = err.reason if isinstance(err, PlanConflict) else str(err)
    message = "tensor_parallel(%r): the plan is followed to the letter, as the model's forward does not show it right: %s"
    log = get_logger().debug if NOT_DIVISIBLE in reason else get_logger().warning
    log(message, schedule.path, reason, extra=first_rank_only(schedule))
    return set()


def _check_outputs(schedule: Schedule, outputs: Mapping[str, str], derived: DerivedPlan) -> None:
    """Raise ``PlanConflict`` for a layer that the derived plan leaves whole, or splits along another dimension."""
    found = {path: split.output for path, split in derived.splits.items()}
    for path, output in outputs.items():
        if found.get(path) != output:
            reason = derived.reasons.get(path, f"its input is {'whole' if output == 'reduced' else 'sharded'}")
            raise PlanConflict(schedule, f"{path!r} cannot be split like that: {reason}", [path])


_UNPLANNED = "the published plan of the model leaves it out"


def split_plan_gaps(schedule: Schedule) -> None:
    """Derive a plan for each submodule with attention that a published plan leaves out, and log what stays whole.

    The vision part of a model for images and text is one.
    """
    reasons = dict[str, str]()
    if schedule.example_inputs is not None:
        for path in _attention_modules(schedule):
            try:
                apply_derived_plan(schedule[path])
            except (ScheduleError, TraceError) as err:
                reasons[f"{path}."] = f"{_UNPLANNED}, and none can be derived: {err}"
    log_replicated_attentions(schedule, reasons, _UNPLANNED)


def _attention_modules(schedule: Schedule) -> list[str]:
    """Return the outermost modules with attention and no split. A repeated module is none."""
    found = dict[str, None]()
    for path in attention_heads.replicated_attentions(schedule.mod):
        names = path.split(".")
        for end in range(1, len(names)):
            outer = ".".join(names[:end])
            if without_block_numbers(outer) != outer:
                break
            if not any(map(is_sharded, schedule.mod.get_submodule(outer).parameters())):
                found[outer] = None
                break
    return list(found)
