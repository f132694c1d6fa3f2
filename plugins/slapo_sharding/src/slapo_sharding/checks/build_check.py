"""Check that every declared shard has the sync it needs, when a schedule is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Schedule, Step, is_sharded, shard_spec

from ..communication.batch_norm_statistics import resolve_replicas
from ..rules.sharding_rule import AppliedCut, applied_cut, holds, is_kept_for_inside, split_of
from ..splitting import attention_heads
from ..splitting.aliased_tensors import check_shared_memory
from ..splitting.module_paths import ancestors
from ..splitting.shard_step import user_code
from ..syncs.sync_hooks import REDUCING, Sync, sums_gradient, syncs_of
from ..syncs.sync_order import MOVING, OFF, check_moves
from .first_run_check import watch

_LONGEST = 200  # of a step's arguments, which may be a whole plan


def before_build(schedule: Schedule, target: str | None, config: dict[str, Any]) -> None:
    """Find the replicas, and check the shards unless ``check=False``, an option that some dialects take, too."""
    resolve_replicas(schedule)
    if config.get("check", True):
        check(schedule)
        in_place = target is None or schedule.registry.get("dialect", target).trains_in_place(**config)
        if not in_place or not _has_replicas_alone(schedule):
            check_shared_memory(schedule.root_module)
    if target is None or not schedule.registry.get("dialect", target).takes_check:
        config.pop("check", None)


def _has_replicas_alone(schedule: Schedule) -> bool:
    mesh = schedule.mesh
    return mesh is not None and "dp" in (mesh.mesh_dim_names or ()) and mesh["dp"].size() == dist.get_world_size()


def check(schedule: Schedule) -> None:
    """Refuse shards that lack a sync, and at the first run what others read of them."""
    check_syncs(schedule)
    root = schedule.root_module
    watch(root, (module for module in root.modules() if _is_cut(module) or _is_synced(module)))


def check_syncs(schedule: Schedule) -> None:
    """Go through all modules of the model.

    Raises:
        BuildError: names the first module whose sync is missing, doubled or impossible, that reduces where nothing is
            sharded, that holds a shard unawares, or that got a hook or forward since; or the attention module that has only
            some projections sharded; and the last step taken there.
    """
    modules = dict(schedule.root_module.named_modules())
    if not any(_is_cut(module) or _is_synced(module) for module in modules.values()):
        _check_summed(schedule.root_module)
    for path in modules:
        try:
            _check_module(path, modules)
        except BuildError as err:
            raise BuildError(f"{_last_step(schedule, path)}{err}") from err


def _check_module(path: str, modules: dict[str, nn.Module]) -> None:
    module, name = modules[path], repr(path) if path else "the model"
    _check_stray(name, module)
    _check_gradients(name, module, path, modules)
    applied = applied_cut(module)
    if applied is None or applied.cut.output != "whole":
        _check_heads(name, module)
    if applied is None:
        _check_unawares(name, module, [modules[outer] for outer in ancestors(path)])
        _check_gathered_around(name, module, path)
    elif applied.spec.num_shards > 1 and applied.cut.output != "whole":
        _check_code(name, module)
        own = list(syncs_of(module))
        above = [sync for outer in ancestors(path) for sync in syncs_of(modules[outer])]
        _check_output(name, applied, own, above)
        _check_input(name, applied, own, above, _beside(path, modules))
    check_moves(name, module, split_of(module))


def _last_step(schedule: Schedule, path: str) -> str:
    """The step of the schedule to look at first: the last one that was for this module, else for one inside it."""
    steps = [(number, step, _synced(step)) for number, step in enumerate(schedule.journal, 1)]
    at = [(number, step) for number, step, paths in steps if path in paths]
    below = f"{path}." if path else ""
    inside = [(number, step) for number, step, paths in steps if any(other.startswith(below) for other in paths)]
    if not at + inside:
        return ""
    number, step = (at or inside)[-1]
    return f"step {number}, {str(step)[:_LONGEST]}: "


def _synced(step: Step) -> set[str]:
    """Paths of the modules that a step shards or syncs, itself or by others."""
    own = {step.path} if step.name in ("shard", "sync") else set()
    return own.union(*map(_synced, step.children))


def cut_modules(root: nn.Module) -> list[nn.Module]:
    """The modules that hold only a part on this rank."""
    return [module for module in root.modules() if _is_cut(module)]


def _check_unawares(name: str, module: nn.Module, above: Iterable[nn.Module]) -> None:
    for own, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        is_used = is_kept_for_inside(module, tensor) or any(split_of(outer) and holds(outer, tensor) for outer in above)
        if is_sharded(tensor) and not is_used:
            spec = shard_spec(tensor)
            if spec is not None and spec.axis == "dp":
                raise BuildError(
                    f"{name} holds {own!r}, which an engine with data_parallel='fsdp' has sharded over replicas; build that "
                    "engine with data_parallel='ddp', or give each engine a module of its own"
                )
            raise BuildError(f"{name} holds {own!r} that is sharded elsewhere; shard it here in the same way")


def _check_code(name: str, module: nn.Module) -> None:
    if own := user_code(module):
        raise BuildError(
            f"{name} has a {own} of its own that would see a part only; put it on a module around, or give it to sync; {OFF}"
        )


def _check_gathered_around(name: str, module: nn.Module, path: str) -> None:
    """Parts that are not equal are put together where their sizes are known."""
    if not any(sync.mode == "fwd_post" and sync.op in MOVING and sync.axis == -1 for sync in syncs_of(module)):
        return
    for other, inside in module.named_modules(prefix=path):
        applied = applied_cut(inside)
        if applied is not None and applied.spec.dealt is not None and applied.cut.output == "sharded" and not applied.gathered:
            raise BuildError(f"{name}: the output of {other!r} is not in equal parts; gather it at {other!r} itself; {OFF}")


def _check_stray(name: str, module: nn.Module) -> None:
    """A sum over ranks that all hold the same is that many times too large."""
    stray = next((sync for sync in syncs_of(module) if sync.op in REDUCING), None)
    if stray is None or any(_is_cut(inside) for inside in module.modules()):
        return
    raise BuildError(
        f"{name}: sync({stray.mode!r}, {stray.op!r}) adds up what is the same on every rank, as nothing in it is sharded; "
        f"shard it, after any replace, or leave the sync out; {OFF}"
    )


def _check_gradients(name: str, module: nn.Module, path: str, modules: dict[str, nn.Module]) -> None:
    """A sum of gradients that are whole, too: a sharded layer inside has to use the value for its own part."""
    summing = next((sync for sync in syncs_of(module) if _reduces_gradient(sync)), None)
    if summing is None or any(sync.op == "function" for inside in module.modules() for sync in syncs_of(inside)):
        return
    if _sums(module) or any(_uses_own(inside, other, path, modules) for other, inside in module.named_modules(prefix=path)):
        return
    remedy = "leave it out" if summing.mode == "bwd_post" else "give it backward='split', or leave it out"
    raise BuildError(
        f"{name}: sync({summing.mode!r}, {summing.op!r}) adds up gradients that are the same on every rank, as nothing in it "
        f"is sharded and takes the whole of its input; {remedy}; {OFF}"
    )


def _uses_own(module: nn.Module, path: str, around: str, modules: dict[str, nn.Module]) -> bool:
    """Return whether a rank may use the input of an outer module for its own shard of this one.

    One that takes a part of its input may have it cut out by the model's code, but not by a sync, which has a backward.
    """
    applied = applied_cut(module)
    if applied is None or not _is_cut(module) or applied.cut.input in ("indices", "whole"):
        return False
    if applied.cut.input == "replicated":
        return True
    between = [module, *(modules[outer] for outer in ancestors(path) if len(outer) > len(around) and outer in modules)]
    scattered = any(sync.mode == "fwd_pre" and sync.op == "scatter" for each in between for sync in syncs_of(each))
    return path != around and not scattered


def _sums(module: nn.Module) -> bool:
    """Return whether the schedule says that each rank uses a replicated value in its own way; the first run checks it."""
    return any(sums_gradient(parameter) for parameter in module.parameters())


def _check_summed(root: nn.Module) -> None:
    for name, parameter in root.named_parameters():
        if sums_gradient(parameter):
            raise BuildError(f"the gradient of {name!r} is summed, but nothing is sharded; leave the sync out; {OFF}")


def _check_heads(name: str, owner: nn.Module) -> None:
    """Local heads of one projection would be paired with all heads of another."""
    local: dict[bool, list[str]] = {True: [], False: []}
    for projection, child in owner.named_children():
        if attention_heads.makes_heads(owner, projection) and next(child.parameters(), None) is not None:
            local[_makes_local_heads(child) or _makes_local_heads(_heaviest(child))].append(projection)
    if local[True] and local[False]:
        raise BuildError(
            f"{name}: {', '.join(local[True])} make local heads, {', '.join(local[False])} all of them; "
            f"shard all projections of the attention or none; {OFF}"
        )


def _heaviest(projection: nn.Module) -> nn.Module:
    """Return the module with most numbers of its own: in an adapter around a projection, the projection."""
    return max(projection.modules(), key=lambda module: sum(each.numel() for each in module.parameters(recurse=False)))


def _is_synced(module: nn.Module) -> bool:
    return any(sync.op != "function" for sync in syncs_of(module))


def _makes_local_heads(module: nn.Module) -> bool:
    applied = applied_cut(module)
    return _is_cut(module) and applied is not None and applied.cut.output == "sharded" and not applied.gathered


def _is_cut(module: nn.Module) -> bool:
    return split_of(module) is not None


def _check_output(name: str, applied: AppliedCut, own: list[Sync], above: list[Sync]) -> None:
    reducing = [sync for sync in own if sync.mode == "fwd_post" and sync.op in REDUCING]
    after = [sync for sync in own if sync.mode == "fwd_post"]
    if applied.cut.output == "sharded":
        if reducing:
            raise BuildError(f"{name}: its output is sharded, {reducing[0].op} would add different parts; gather it; {OFF}")
        moving = next((sync.op for sync in after if sync.op in MOVING), None)
        if moving and len(applied.spec.blocks) > 1 and not applied.cut.parts:
            mixed = f"its output is made of blocks, each split for itself, which {moving} would mix"
            raise BuildError(f"{name}: {mixed}; shard it with gathered=True; {OFF}")
        if moving == "all_to_all" and applied.spec.dealt is not None:
            raise BuildError(f"{name}: its output is not in equal parts, which all_to_all needs; all_gather it; {OFF}")
        if applied.gathered and not any(sync.op in ("all_gather", "function") for sync in after):
            raise BuildError(f"{name}: sharded with gathered=True; needs sync('fwd_post', 'all_gather', axis=-1); {OFF}")
        return
    if len(reducing) > 1:
        raise BuildError(f"{name}: its output is reduced {len(reducing)} times; sync it once; {OFF}")
    if any(sync.op == "function" for sync in after) or reducing:
        return
    if applied.late_bias or not any(sync.mode == "fwd_post" and sync.op in (*REDUCING, "function") for sync in above):
        raise BuildError(f"{name}: its output is partial; needs sync('fwd_post', 'all_reduce'); {OFF}")


def _check_input(name: str, applied: AppliedCut, own: list[Sync], above: list[Sync], beside: Iterator[Sync]) -> None:
    """Somebody has to sum the gradient of a whole input: the module, one around it, or one that makes it, a norm say.

    Whether that one makes it shows when the model runs.
    """
    if applied.cut.input != "replicated":
        return
    reducing = [sync for sync in (*own, *above) if _reduces_gradient(sync)]
    if len(reducing) > 1:
        raise BuildError(f"{name}: the gradient of its input is reduced {len(reducing)} times; sync it once; {OFF}")
    if reducing or any(sync.op == "function" and sync.mode != "fwd_post" for sync in (*own, *above)):
        return
    if not any(_reduces_gradient(sync, "fwd_post") for sync in beside):
        raise BuildError(f"{name}: the gradient of its input is partial; needs sync('bwd_post', 'all_reduce'); {OFF}")


def _beside(path: str, modules: dict[str, nn.Module]) -> Iterator[Sync]:
    """The syncs of what stands beside a module, or beside one around it, and is whole itself."""
    for outer in ancestors(path):
        for child in modules[outer].children():
            if not cut_modules(child):
                yield from syncs_of(child)


def _reduces_gradient(sync: Sync, mode: str = "fwd_pre") -> bool:
    if sync.mode == "bwd_post":
        return sync.op == "all_reduce"
    return sync.mode == mode and sync.op == "all_gather" and sync.backward == "reduce_scatter"
