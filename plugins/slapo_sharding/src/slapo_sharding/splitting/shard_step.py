"""Application of a planned shard step: shards, local attributes, and the forwards of sharding rules."""

from __future__ import annotations

import types
from dataclasses import dataclass, field

import torch
from torch import nn

from slapo_core import Schedule, ShardSpec, parameter_facts, successor
from slapo_tracing.nodes import own_forward
from slapo_training.gradient_hooks import move_hooks, shard_attributes

from ..rules.parametrizations import is_computing, source_parameters
from ..rules.sharding_rule import AppliedCut, Cut, applied_cut, record_cut, tensor_of
from ..syncs import overlapped_linear
from ..syncs.sync_hooks import Sync
from . import attention_heads, persistent_hooks, weight_digests
from .persistent_hooks import has_replicated_pieces, reduce_replicated_pieces


@dataclass
class ShardStep:
    """Plan of one call of ``shard``.

    Args:
        module: The module of the call.
        record: Record that is kept on it.
        cuts: Every module that is split: the module of the call, and those tied to it.
        pieces: ``(module, path, tensor, spec)`` of each tensor that is split now; a tied tensor once.
        owner: The attention module that will count local heads.
    """

    module: nn.Module
    record: AppliedCut
    cuts: dict[nn.Module, Cut] = field(default_factory=dict)
    pieces: list[tuple[nn.Module, str, torch.Tensor, ShardSpec]] = field(default_factory=list)
    owner: nn.Module | None = None


def apply_step(schedule: Schedule, step: ShardStep) -> None:
    """Change the model as planned."""
    num_shards, handles = step.record.spec.num_shards, {step.module: schedule}
    if not step.cuts.keys() <= handles.keys():
        found = schedule.get_top_schedule().named_schedules()
        handles = {handle.mod: handle for _, handle in found if handle.mod in step.cuts}
    for module in step.cuts:
        schedule.touch(module)
    for module, path, tensor, spec in step.pieces:
        if num_shards == 1:
            parameter_facts(tensor).spec = spec
        else:
            below, _, name = path.rpartition(".")
            handle = handles[module][below] if below else handles[module]
            handle.set_parameter(name, new := local_shard(tensor, spec))
            move_hooks(new, tensor, spec, handle.places_of(new, (handle.mod, name)))
            if has_replicated_pieces(spec) and isinstance(tensor, nn.Parameter):
                hook = reduce_replicated_pieces(handle.mod.get_parameter(name), spec)
                persistent_hooks.keep_hook(schedule, handle.mod, name, hook)
            if below:
                persistent_hooks.keep_facts(handle.mod)
    for module, cut in step.cuts.items():
        if num_shards > 1:
            _use_local_attributes(module, cut, step.record.spec)
            persistent_hooks.keep_facts(module)
        if module is not step.module:
            record_cut(module, AppliedCut(cut, step.record.spec, num_shards > 1 and has_late_bias(module, cut)))
    if num_shards > 1:
        for name in step.record.cut.summed:
            persistent_hooks.reduce_gradient(schedule, step.module, name, seen=True, by_plan=True)
    record_cut(step.module, step.record)
    if step.owner is not None:
        schedule.touch(step.owner)
        attention_heads.count_local_heads(step.owner, schedule.name, step.record.spec.blocks, num_shards)


def local_shard(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return the shard of a parameter or buffer, with the facts, gradient and attributes of the tensor."""
    new = successor(tensor, spec.local(tensor.detach()), spec=spec)
    shard_attributes(new, tensor.shape, spec.dim, spec.local)
    if tensor.grad is not None:
        new.grad = spec.local(tensor.grad)
    weight_digests.record_digest(new, tensor)
    return new


def _use_local_attributes(module: nn.Module, cut: Cut, spec: ShardSpec) -> None:
    whole, part = spec.full_shape[spec.dim], spec.sizes[spec.rank]
    for name in cut.attributes:
        if (value := getattr(module, name, None)) is not None:
            setattr(module, name, part if value == whole else value // spec.num_shards)
    if needs_forward(module, cut):
        assert cut.forward is not None
        module.__dict__["forward"] = types.MethodType(cut.forward, module)
    elif cut.input == "replicated" and overlapped_linear.overlaps(module):
        overlapped_linear.overlap(module)


_HOOKS = {
    "forward pre-hook": "_forward_pre_hooks",
    "forward hook": "_forward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
    "backward hook": "_backward_hooks",
}


def user_code(module: nn.Module) -> str | None:
    """Return the kind of the user's own code that runs with this module, or None."""
    for kind, table in _HOOKS.items():
        hooks = module.__dict__[table]
        if not all(isinstance(hook, (Sync, persistent_hooks.PersistentHook)) or is_computing(hook) for hook in hooks.values()):
            return kind
    forward, applied = own_forward(module), applied_cut(module)
    ours = forward is None or overlapped_linear.is_overlapping(forward)
    ours = ours or (applied is not None and applied.cut.output == "whole")
    ours = ours or (applied is not None and getattr(forward, "__func__", None) is applied.cut.forward)
    return None if ours else "forward"


def needs_forward(module: nn.Module, cut: Cut) -> bool:
    """Return whether the cut's own forward has to replace the module's."""
    return cut.forward is not None and (not cut.late_bias or has_late_bias(module, cut))


def has_late_bias(module: nn.Module, cut: Cut) -> bool:
    """Return whether there is a bias that the reducing sync has to add."""
    held = (tensor_of(module, source) for source in source_parameters(module, "bias"))
    return cut.late_bias and any(each is not None for each in held)
