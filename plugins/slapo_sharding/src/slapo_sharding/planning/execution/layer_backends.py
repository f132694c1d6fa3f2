"""Layers of an engine's own in the place of layers that a plan has split, and of the loss that is computed from parts.

The plan is carried out first, so parts, facts and syncs are what they are without a backend. A layer of the engine then takes
the very parameters of the one it replaces, and does of its collectives those that are its own work: a sync of the module that
does the same is told to the checks from then on, and no longer runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from slapo_core import Entry, PluginError, Schedule, ScheduleError, ShardSpec, failure_reason, get_logger
from slapo_tracing.nodes import forward_wrappers

from ...rules.sharding_rule import AppliedCut, record_cut, split_of
from ...splitting.module_paths import without_block_numbers as kind_of_path
from ...syncs.parallel_loss import ParallelLoss
from ...syncs.sync_hooks import Sync, map_first_input, syncs_of
from ..derivation.replicated_modules import first_rank_only

Kind = Literal["columns", "rows", "vocabulary", "loss"]
_KINDS: dict[tuple[str, str], Kind] = {
    ("replicated", "sharded"): "columns",
    ("sharded", "partial"): "rows",
    ("indices", "partial"): "vocabulary",
}


class LayerBackend(Protocol):
    """Factory of layers that a plugin registers by ``slapo_layer_backends``."""

    def __call__(self, module: nn.Module, kind: Kind, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
        """The engine's layer for one that is split, or why there is none, as the end of a sentence.

        Args:
            module: The split layer; nothing of it may be changed but attributes of its parameters. Of a loss: what computes
                the losses of tokens so far, which the new module may keep and call where it cannot do better.
            kind: ``"columns"``: its output is sharded. ``"rows"``: its input is, and the new layer has to return the sum over
                the ranks, with the bias once. ``"vocabulary"``: a table whose rows are sharded, and the sum likewise.
                ``"loss"``: called as ``(logits [tokens, columns], target [tokens], ignore_index)``, it returns each token's
                cross entropy in float32, equal on all ranks, 0 and without a gradient where the target is ``ignore_index``;
                any other one outside of the vocabulary is an ``IndexError``. Others may follow: return a str for these.
            spec: How its weight was split; of a loss: how the head's was.
            sums_gradient: Of columns: whether the new layer has to sum the gradient of its input over the ranks. If not,
                somebody else does, and it must leave it a part.

        Returns:
            A module with the same parameters, the very tensors, under the same names; called as ``module`` is.
        """


class DoneInside(Sync):
    """A sync that the module itself carries out, kept where it was for the checks."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> Any:
        """Change no value; the gradient of a new tensor is that of this one use, which the first run tells by the tensor."""
        return map_first_input(_anew, args, kwargs) if self.mode == "bwd_post" else None


def _anew(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x


def backend_of(schedule: Schedule, name: object) -> LayerBackend:
    """The backend of this name, imported now.

    Raises:
        ScheduleError: no plugin registers it.
        PluginError: a plugin's hook fails, two register one name, or it cannot be imported.
    """
    found = schedule.registry.provided("slapo_layer_backends", "backend")
    if not isinstance(name, str) or name not in found:
        raise ScheduleError(_unknown(schedule, name, found), path=schedule.path, primitive="tensor_parallel")
    entry, *others = found[name]
    if others:
        raise Entry.conflict(found[name])
    return entry.load()  # type: ignore[no-any-return]


def _unknown(schedule: Schedule, name: object, found: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), [*found, "megatron"], n=1)
    guess = f"did you mean {near[0]!r}? " if near and near[0] != name else ""
    failed = [failure for record in schedule.registry.records if (failure := record.failure)]
    install = [] if "megatron" in found else ["'megatron' comes with slapo-megatron, pip install slapo-megatron"]
    known = ", ".join(map(repr, sorted(found))) or "none"
    return "; ".join([f"no backend {name!r}", f"{guess}available: {known}", *install, *failed])


def split_modules(schedule: Schedule) -> set[nn.Module]:
    """The modules of which this rank has a part."""
    return {module for module in schedule.mod.modules() if split_of(module) is not None}


def replace_layers(
    schedule: Schedule, name: str, backend: LayerBackend, before: set[nn.Module], loss: ParallelLoss | None
) -> None:
    """Put the engine's layers in the places of those split by this step; say once what stays, and why.

    Args:
        schedule: Of what was split.
        name: Of the backend, for messages.
        backend: Makes the layers.
        before: What was split before this step, and stays as it is.
        loss: What computes the model's loss from parts, if this step has put it.

    Raises:
        ScheduleError: there is none for any of the layers.
        PluginError: the backend fails, or makes a layer of other parameters.
    """
    reasons: dict[str, str] = {}
    replaced = False
    for path, module in list(schedule.mod.named_modules()):
        applied = split_of(module)
        if applied is None or module in before or applied.cut.output == "whole":
            continue
        made = _made(name, backend, module, applied)
        if isinstance(made, str):
            reasons[path] = made
        else:
            _put(schedule[path] if path else schedule, applied, made)
            replaced = True
    if loss is not None:
        made = _asked(name, backend, loss.losses, "loss", loss.spec)
        if isinstance(made, str):
            reasons["loss_function"] = made
        else:
            loss.losses = made.train(loss.training)
    if schedule.world_size > 1 and not replaced:
        what = _told(reasons) or "nothing is split"
        raise ScheduleError(
            f"backend {name!r} has no layer for any that is split: {what}; leave out backend",
            path=schedule.path,
            primitive="tensor_parallel",
        )
    if reasons:
        what = "tensor_parallel(%r): not replaced by layers of %r: %s"
        get_logger().warning(what, schedule.path, name, _told(reasons), extra=first_rank_only(schedule))


def _told(reasons: Mapping[str, str]) -> str:
    """Paths by reason, those of repeated layers once."""
    paths: dict[str, dict[str, list[str]]] = {}
    for path, why in reasons.items():
        paths.setdefault(why, {}).setdefault(kind_of_path(path), []).append(path)
    named = {why: [of[0] if len(of) == 1 else kind for kind, of in kinds.items()] for why, kinds in paths.items()}
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in named.items())


def _made(name: str, backend: LayerBackend, module: nn.Module, applied: AppliedCut) -> nn.Module | str:
    what = _KINDS.get((applied.cut.input, applied.cut.output))
    if what is None:
        return f"engines have no {type(module).__name__} that is split so"
    if forward_wrappers(module):
        return "its forward is wrapped"
    moved = list(syncs_of(module, "fwd_post"))
    if what != "columns" and [(sync.op, sync.fn) for sync in moved] != [("all_reduce", None)]:
        return f"its output is not made whole by one all_reduce of its own, but by {[sync.op for sync in moved] or 'others'}"
    return _asked(name, backend, module, what, applied.spec, sums_gradient=_own_sum(module) is not None)


def _asked(
    name: str, backend: LayerBackend, module: nn.Module, what: Kind, spec: ShardSpec, *, sums_gradient: bool = False
) -> nn.Module | str:
    try:
        made = backend(module, what, spec, sums_gradient=sums_gradient)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"backend {name!r} failed on a {type(module).__name__}: {failure_reason(error)}", owner=name
        ) from error
    if isinstance(made, nn.Module) and _held(made) != _held(module):
        kind = type(made).__name__
        raise PluginError(
            f"backend {name!r} made a {kind} that does not hold the parameters of the layer it is for", owner=name
        )
    return made


def _held(module: nn.Module) -> dict[str, int]:
    return {key: id(tensor) for key, tensor in module.named_parameters() if tensor is not None}


def _own_sum(module: nn.Module) -> Sync | None:
    """The sync that sums the gradient of this one layer's input, if the engine's layer can do that."""
    for sync in syncs_of(module, "bwd_post"):
        if sync.fn is None and sync.shared is not None and sync.shared.members == 1:
            return sync
    return None


def _put(handle: Schedule, applied: AppliedCut, new: nn.Module) -> None:
    """Put a layer in the place of another, with what is known of that and what is hooked onto it."""
    old = handle.mod
    known = handle.metadata.primitives
    done = [_own_sum(old)] if applied.cut.output == "sharded" else list(syncs_of(old, "fwd_post"))
    handle.replace_module(new)
    handle.metadata.primitives.update(known)
    for name, table in vars(old).items():
        if "_hooks" in name and isinstance(table, dict):
            vars(new)[name].update(table)
    for table in (new._forward_pre_hooks, new._forward_hooks):
        table.update({key: DoneInside(**vars(hook)) for key, hook in table.items() if any(hook is each for each in done)})
    record_cut(new, replace(applied, late_bias=False))
    new.train(old.training)
