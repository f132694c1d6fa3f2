"""Checks at ``build``: every shard has the syncs that it needs, and no trained parameter shares memory with another tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Schedule, Step, is_sharded, parameter_facts, shard_spec

from ..rules.sharding_rule import AppliedCut, applied_cut, holds_tensor, is_kept_for_inside, returns_shard, split_of
from ..splitting import attention_heads
from ..splitting.module_paths import ancestors
from ..splitting.persistent_hooks import reduces_gradient
from ..splitting.shard_step import user_code
from ..syncs.sync_hooks import GATHERING_OPS, OFF_SWITCH, REDUCING, Sync, check_sync_order, syncs_of

_MAX_STEP_LENGTH = 200  # in messages; the arguments of a step may be a whole plan


def check_syncs(schedule: Schedule) -> None:
    """Check the syncs of all modules of the model.

    Raises:
        BuildError: a sync is missing, doubled, impossible, or reduces a replicated value; a module holds a shard that was made
            elsewhere, or got a hook or forward since; or only some projections of an attention are sharded. The message names
            the first such module and the last step taken there.
    """
    modules = dict(schedule.root_module.named_modules())
    if not any(split_of(module) or is_synced(module) for module in modules.values()):
        for name, parameter in schedule.root_module.named_parameters():
            if reduces_gradient(parameter):
                what = f"the gradient of {name!r} is summed, but nothing is sharded"
                raise BuildError(f"{what}; leave the sync out; {OFF_SWITCH}")
    for path in modules:
        try:
            _check_module(path, modules)
        except BuildError as err:
            raise BuildError(f"{_last_step(schedule, path)}{err}") from err


def _check_module(path: str, modules: dict[str, nn.Module]) -> None:
    module, name = modules[path], repr(path) if path else "the model"
    _check_superfluous_reduce(name, module)
    _check_gradients(name, module, path, modules)
    applied = applied_cut(module)
    if applied is None or applied.cut.output != "whole":
        _check_heads(name, module)
    if applied is None:
        _check_tied_shards(name, module, [modules[outer] for outer in ancestors(path)])
        _check_gathered_around(name, module, path)
    elif applied.spec.num_shards > 1 and applied.cut.output != "whole":
        if code := user_code(module):
            what = f"{name} has a {code} of its own that would see a part only"
            raise BuildError(f"{what}; put it on a module around, or give it to sync; {OFF_SWITCH}")
        own = list(syncs_of(module))
        above = [sync for outer in ancestors(path) for sync in syncs_of(modules[outer])]
        _check_output(name, applied, own, above)
        _check_input(name, applied, own, above, _neighbour_syncs(path, modules))
    check_sync_order(name, module, split_of(module))


def _last_step(schedule: Schedule, path: str) -> str:
    """Return the last step for this module, or else for a module inside it, as the start of a message."""
    steps = [(number, step, _split_paths(step)) for number, step in enumerate(schedule.journal, 1)]
    at = [(number, step) for number, step, paths in steps if path in paths]
    below = f"{path}." if path else ""
    inside = [(number, step) for number, step, paths in steps if any(other.startswith(below) for other in paths)]
    if not at + inside:
        return ""
    number, step = (at or inside)[-1]
    return f"step {number}, {str(step)[:_MAX_STEP_LENGTH]}: "


def _split_paths(step: Step) -> set[str]:
    """Return the paths of the modules that a step or its children shard or sync."""
    own = {step.path} if step.name in ("shard", "sync") else set()
    return own.union(*map(_split_paths, step.children))


def _check_tied_shards(name: str, module: nn.Module, above: Iterable[nn.Module]) -> None:
    for own, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        is_used = is_kept_for_inside(module, tensor) or any(split_of(outer) and holds_tensor(outer, tensor) for outer in above)
        if is_sharded(tensor) and not is_used:
            spec = shard_spec(tensor)
            if spec is not None and spec.axis == "dp":
                raise BuildError(
                    f"{name} holds {own!r}, which an engine with data_parallel='fsdp' has sharded over replicas; build that "
                    "engine with data_parallel='ddp', or give each engine a module of its own"
                )
            raise BuildError(f"{name} holds {own!r} that is sharded elsewhere; shard it here in the same way")


def _check_gathered_around(name: str, module: nn.Module, path: str) -> None:
    """Refuse to gather uneven shards at an outer module, which does not know their sizes."""
    if not any(sync.mode == "fwd_post" and sync.op in GATHERING_OPS and sync.axis == -1 for sync in syncs_of(module)):
        return
    for other, inside in module.named_modules(prefix=path):
        applied = applied_cut(inside)
        if applied is not None and applied.returns_shard and applied.spec.uneven_ranges is not None:
            what = f"the output of {other!r} is not in equal parts; gather it at {other!r} itself"
            raise BuildError(f"{name}: {what}; {OFF_SWITCH}")


def _check_superfluous_reduce(name: str, module: nn.Module) -> None:
    """Refuse to reduce a replicated value, which would be multiplied by the number of ranks."""
    stray = next((sync for sync in syncs_of(module) if sync.op in REDUCING), None)
    if stray is None or any(split_of(inside) for inside in module.modules()):
        return
    raise BuildError(
        f"{name}: sync({stray.mode!r}, {stray.op!r}) adds up what is the same on every rank, as nothing in it is sharded; "
        f"shard it, after any replace, or leave the sync out; {OFF_SWITCH}"
    )


def _check_gradients(name: str, module: nn.Module, path: str, modules: dict[str, nn.Module]) -> None:
    """Refuse to reduce a replicated gradient: a sharded layer inside has to use the input for its own shard."""
    summing = next((sync for sync in syncs_of(module) if _reduces_gradient(sync)), None)
    if summing is None or any(sync.op == "function" for inside in module.modules() for sync in syncs_of(inside)):
        return
    if any(map(reduces_gradient, module.parameters())) or any(
        _uses_input_for_shard(inside, other, path, modules) for other, inside in module.named_modules(prefix=path)
    ):
        return
    remedy = "leave it out" if summing.mode == "bwd_post" else "give it backward='split', or leave it out"
    raise BuildError(
        f"{name}: sync({summing.mode!r}, {summing.op!r}) adds up gradients that are the same on every rank, as nothing in it "
        f"is sharded and takes the whole of its input; {remedy}; {OFF_SWITCH}"
    )


def _uses_input_for_shard(module: nn.Module, path: str, around: str, modules: dict[str, nn.Module]) -> bool:
    """Return whether a rank may use the input of an outer module for its own shard of this one.

    The model's own code may scatter the input of a row-parallel layer; a sync that scatters has its own backward.
    """
    applied = applied_cut(module)
    if applied is None or not split_of(module) or applied.cut.input in ("indices", "whole"):
        return False
    if applied.cut.input == "replicated":
        return True
    between = [module, *(modules[outer] for outer in ancestors(path) if len(outer) > len(around) and outer in modules)]
    scattered = any(sync.mode == "fwd_pre" and sync.op == "scatter" for each in between for sync in syncs_of(each))
    return path != around and not scattered


def _check_heads(name: str, owner: nn.Module) -> None:
    """Refuse an attention that would pair the local heads of one projection with all heads of another."""
    local: dict[bool, list[str]] = {True: [], False: []}
    for projection, child in owner.named_children():
        if attention_heads.makes_heads(owner, projection) and next(child.parameters(), None) is not None:
            # the module with most parameters of its own is the projection inside an adapter
            inner = max(child.modules(), key=lambda module: sum(each.numel() for each in module.parameters(recurse=False)))
            local[returns_shard(child) or returns_shard(inner)].append(projection)
    if local[True] and local[False]:
        raise BuildError(
            f"{name}: {', '.join(local[True])} make local heads, {', '.join(local[False])} all of them; "
            f"shard all projections of the attention or none; {OFF_SWITCH}"
        )


def is_synced(module: nn.Module) -> bool:
    """Return whether a module has a sync other than a function."""
    return any(sync.op != "function" for sync in syncs_of(module))


def _check_output(name: str, applied: AppliedCut, own: list[Sync], above: list[Sync]) -> None:
    reducing = [sync for sync in own if sync.mode == "fwd_post" and sync.op in REDUCING]
    after = [sync for sync in own if sync.mode == "fwd_post"]
    if applied.cut.output == "sharded":
        if reducing:
            what = f"its output is sharded, {reducing[0].op} would add different parts"
            raise BuildError(f"{name}: {what}; gather it; {OFF_SWITCH}")
        moving = next((sync.op for sync in after if sync.op in GATHERING_OPS), None)
        if moving and len(applied.spec.blocks) > 1 and not applied.cut.parts:
            mixed = f"its output is made of blocks, each split for itself, which {moving} would mix"
            raise BuildError(f"{name}: {mixed}; shard it with gathered=True; {OFF_SWITCH}")
        if moving == "all_to_all" and applied.spec.uneven_ranges is not None:
            raise BuildError(f"{name}: its output is not in equal parts, which all_to_all needs; all_gather it; {OFF_SWITCH}")
        if applied.gathered and not any(sync.op in ("all_gather", "function") for sync in after):
            raise BuildError(f"{name}: sharded with gathered=True; needs sync('fwd_post', 'all_gather', axis=-1); {OFF_SWITCH}")
        return
    if len(reducing) > 1:
        raise BuildError(f"{name}: its output is reduced {len(reducing)} times; sync it once; {OFF_SWITCH}")
    if any(sync.op == "function" for sync in after) or reducing:
        return
    if applied.late_bias or not any(sync.mode == "fwd_post" and sync.op in (*REDUCING, "function") for sync in above):
        raise BuildError(f"{name}: its output is partial; needs sync('fwd_post', 'all_reduce'); {OFF_SWITCH}")


def _check_input(name: str, applied: AppliedCut, own: list[Sync], above: list[Sync], beside: Iterator[Sync]) -> None:
    """Refuse a replicated input whose partial gradient is not reduced by the module, an outer module or a neighbour.

    The first run checks that the neighbour, for example a norm, really makes the input.
    """
    if applied.cut.input != "replicated":
        return
    reducing = [sync for sync in (*own, *above) if _reduces_gradient(sync)]
    if len(reducing) > 1:
        raise BuildError(f"{name}: the gradient of its input is reduced {len(reducing)} times; sync it once; {OFF_SWITCH}")
    if reducing or any(sync.op == "function" and sync.mode != "fwd_post" for sync in (*own, *above)):
        return
    if not any(_reduces_gradient(sync, "fwd_post") for sync in beside):
        raise BuildError(f"{name}: the gradient of its input is partial; needs sync('bwd_post', 'all_reduce'); {OFF_SWITCH}")


def _neighbour_syncs(path: str, modules: dict[str, nn.Module]) -> Iterator[Sync]:
    """Yield the syncs of replicated neighbours of a module and of the modules around it."""
    for outer in ancestors(path):
        for child in modules[outer].children():
            if not any(map(split_of, child.modules())):
                yield from syncs_of(child)


def _reduces_gradient(sync: Sync, mode: str = "fwd_pre") -> bool:
    if sync.mode == "bwd_post":
        return sync.op == "all_reduce"
    return sync.mode == mode and sync.op == "all_gather" and sync.backward == "reduce_scatter"


_MARK = "shares memory with "


def note_shared_memory(root: nn.Module) -> None:
    """Tag each parameter and buffer that shares memory with another one."""
    for one, other in overlapping_pairs({id(each): each for each in (*root.parameters(), *root.buffers())}.values()):
        parameter_facts(one).tags.add(f"{_MARK}{parameter_facts(other).names[0]!r}")
        parameter_facts(other).tags.add(f"{_MARK}{parameter_facts(one).names[0]!r}")


def check_shared_memory(root: nn.Module) -> None:
    """Raise ``BuildError`` for trained parameters that share memory with others: shards, stages and buffers are copies.

    One rank makes no copies.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for name, parameter in root.named_parameters():
            shared = [tag for tag in parameter_facts(parameter).tags if tag.startswith(_MARK)]
            if shared and parameter.requires_grad:
                raise BuildError(
                    f"parameter {name!r} {shared[0]}, another parameter or buffer, and ranks would train copies apart; "
                    "make both one nn.Parameter, build without ensure_weight_tying in PEFT, or train on whole replicas, by "
                    "target 'torch' with data_parallel='ddp'"
                )


def overlapping_pairs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of tensors that share memory; each tensor is compared with the next one in memory only."""
    plain = (each for each in tensors if type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided)
    found = sorted((_memory(each), id(each), each) for each in plain if each.numel() and not each.is_meta)
    for (memory, _, one), (following, _, other) in zip(found, found[1:], strict=False):
        if following[:2] == memory[:2] and following[2] < memory[3] and torch.isin(_offsets(one), _offsets(other)).any():
            yield one, other


def _memory(tensor: torch.Tensor) -> tuple[str, int, int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return str(tensor.device), tensor.untyped_storage().data_ptr(), start, start + last * tensor.element_size()


def _offsets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the byte offset of each element of a tensor in its memory."""
    found = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + torch.arange(size) * stride
    return found.flatten() * tensor.element_size()
