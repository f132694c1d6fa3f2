"""Replacement of split layers, and of the loss on sharded logits, by layers of an engine.

The plan is applied first, so that shards, facts and syncs are those of a plan without a backend. Then a layer of the engine
takes the parameters of the layer it replaces, and the collectives that it runs itself. The sync of such a collective no longer
runs; it stays visible to the checks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from slapo_core import Entry, PluginError, Schedule, ShardSpec, failure_reason, get_logger
from slapo_tracing.nodes import forward_wrappers

from ...rules.sharding_rule import AppliedCut, record_cut, split_of
from ...splitting.module_paths import without_block_numbers as kind_of_path
from ...syncs.parallel_loss import ParallelLoss
from ...syncs.sync_hooks import Sync, map_first_input, syncs_of
from ..derivation.replicated_modules import first_rank_only, plan_error

Kind = Literal["columns", "rows", "vocabulary", "loss"]
_KINDS: dict[tuple[str, str], Kind] = {
    ("replicated", "sharded"): "columns",
    ("sharded", "partial"): "rows",
    ("indices", "partial"): "vocabulary",
}


class LayerBackend(Protocol):
    """Factory of layers that a plugin registers by ``slapo_layer_backends``."""

    def __call__(self, module: nn.Module, kind: Kind, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
        """Return the engine's layer for a split layer, or the reason why there is none, as the end of a sentence.

        Args:
            module: Split layer. Only attributes of its parameters may be changed. For a loss: the module that computes the
                losses of tokens so far. The new module may keep it and call it as a fallback.
            kind: ``"columns"``: the output is sharded. ``"rows"``: the input is sharded. The new layer returns the sum over
                the ranks, with the bias added once. ``"vocabulary"``: a table with sharded rows. The new layer returns the sum
                likewise. ``"loss"``: called as ``(logits [tokens, columns], target [tokens], ignore_index)``. It returns each
                token's cross entropy in float32, equal on all ranks. Where the target is ``ignore_index``, it is 0 without a
                gradient. Any other target outside of the vocabulary is an ``IndexError``. Return a str for any other kind, as
                more may follow.
            spec: Split of the weight, or for a loss that of the head.
            sums_gradient: For columns, whether the new layer must reduce the gradient of its input over the ranks. If not,
                another step reduces it, and the layer must leave it partial.

        Returns:
            A module with the same parameter tensors under the same names, called like ``module``.
        """


class BackendSync(Sync):
    """Sync that the module runs itself, kept in its place for the checks."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Any:
        """Return a new view of the input, by which the first-run check tells the gradient of this use."""
        new = lambda x: x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x  # noqa: E731
        return map_first_input(new, args, kwargs) if self.mode == "bwd_post" else None


def backend_of(schedule: Schedule, name: object) -> LayerBackend:
    """Return the backend of this name; it is imported now.

    Raises:
        ScheduleError: no plugin registers it.
        PluginError: a plugin's hook fails, two plugins register one name, or the backend cannot be imported.
    """
    found = schedule.registry.entries_of_hook("slapo_layer_backends", "backend")
    if not isinstance(name, str) or name not in found:
        raise plan_error(schedule, _unknown_backend_message(schedule, name, found))
    entry, *others = found[name]
    if others:
        raise Entry.conflict(found[name])
    return entry.load()  # type: ignore[no-any-return]


def _unknown_backend_message(schedule: Schedule, name: object, found: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), [*found, "megatron"], n=1)
    guess = f"did you mean {near[0]!r}? " if near and near[0] != name else ""
    failed = [failure for record in schedule.registry.records if (failure := record.failure)]
    install = [] if "megatron" in found else ["'megatron' comes with slapo-megatron, pip install slapo-megatron"]
    known = ", ".join(map(repr, sorted(found))) or "none"
    return "; ".join([f"no backend {name!r}", f"{guess}available: {known}", *install, *failed])


def replace_layers(
    schedule: Schedule, name: str, backend: LayerBackend, before: set[nn.Module], loss: ParallelLoss | None
) -> None:
    """Replace the layers split by this step by those of an engine, and log once what stays, with the reason.

    Args:
        schedule: Schedule of the module that was split.
        name: Name of the backend, for messages.
        backend: Factory of the layers.
        before: Modules that were split before this step; they stay.
        loss: Loss on sharded logits that this step installed, or None.

    Raises:
        ScheduleError: the backend has no layer for any of them.
        PluginError: the backend fails, or makes a layer with other parameters.
    """
    reasons: dict[str, str] = {}
    replaced = False
    for path, module in list(schedule.mod.named_modules()):
        applied = split_of(module)
        if applied is None or module in before or applied.cut.output == "whole":
            continue
        made = _make_layer(name, backend, module, applied)
        if isinstance(made, str):
            reasons[path] = made
        else:
            _replace_layer(schedule[path] if path else schedule, applied, made)
            replaced = True
    if loss is not None:
        made = _call_backend(name, backend, loss.losses, "loss", loss.spec)
        if isinstance(made, str):
            reasons["loss_function"] = made
        else:
            loss.losses = made.train(loss.training)
    if schedule.world_size > 1 and not replaced:
        what = _grouped_reasons(reasons) or "nothing is split"
        raise plan_error(schedule, f"backend {name!r} has no layer for any that is split: {what}; leave out backend")
    if reasons:
        what = "tensor_parallel(%r): not replaced by layers of %r: %s"
        get_logger().warning(what, schedule.path, name, _grouped_reasons(reasons), extra=first_rank_only(schedule))


def _grouped_reasons(reasons: Mapping[str, str]) -> str:
    """Return the paths grouped by reason, one per repeated layer."""
    paths: dict[str, dict[str, list[str]]] = {}
    for path, why in reasons.items():
        paths.setdefault(why, {}).setdefault(kind_of_path(path), []).append(path)
    named = {why: [of[0] if len(of) == 1 else kind for kind, of in kinds.items()] for why, kinds in paths.items()}
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in named.items())


def _make_layer(name: str, backend: LayerBackend, module: nn.Module, applied: AppliedCut) -> nn.Module | str:
    what = _KINDS.get((applied.cut.input, applied.cut.output))
    if what is None:
        return f"engines have no {type(module).__name__} with such a split"
    if forward_wrappers(module):
        return "its forward is wrapped"
    moved = list(syncs_of(module, "fwd_post"))
    if what != "columns" and [(sync.op, sync.fn) for sync in moved] != [("all_reduce", None)]:
        return f"its output is not reduced by one all_reduce of its own, but by {[sync.op for sync in moved] or 'other layers'}"
    return _call_backend(name, backend, module, what, applied.spec, sums_gradient=_own_reduction(module) is not None)


def _call_backend(
    name: str, backend: LayerBackend, module: nn.Module, kind: Kind, spec: ShardSpec, *, sums_gradient: bool = False
) -> nn.Module | str:
    try:
        made = backend(module, kind, spec, sums_gradient=sums_gradient)
    except (Exception, SystemExit) as error:
        what = f"backend {name!r} failed on a {type(module).__name__}: {failure_reason(error)}"
        raise PluginError(what, owner=name) from error
    if isinstance(made, nn.Module) and _own_tensors(made) != _own_tensors(module):
        what = f"backend {name!r} made a {type(made).__name__} that does not hold the parameters of the layer it is for"
        raise PluginError(what, owner=name)
    return made


def _own_tensors(module: nn.Module) -> dict[str, int]:
    return {key: id(tensor) for key, tensor in module.named_parameters() if tensor is not None}


def _own_reduction(module: nn.Module) -> Sync | None:
    """Return the sync that reduces the input gradient of this layer alone, which a layer of an engine can do; else None."""
    for sync in syncs_of(module, "bwd_post"):
        if sync.fn is None and sync.shared is not None and sync.shared.members == 1:
            return sync
    return None


def _replace_layer(handle: Schedule, applied: AppliedCut, new: nn.Module) -> None:
    """Replace a layer by another, and move its facts and hooks."""
    old = handle.mod
    known = handle.metadata.primitives
    done = [_own_reduction(old)] if applied.cut.output == "sharded" else list(syncs_of(old, "fwd_post"))
    handle.replace_module(new)
    handle.metadata.primitives.update(known)
    for name, table in vars(old).items():
        if "_hooks" in name and isinstance(table, dict):
            vars(new)[name].update(table)
    for table in (new._forward_pre_hooks, new._forward_hooks):
        table.update({key: BackendSync(**vars(hook)) for key, hook in table.items() if any(hook is each for each in done)})
    record_cut(new, replace(applied, late_bias=False))
    new.train(old.training)
