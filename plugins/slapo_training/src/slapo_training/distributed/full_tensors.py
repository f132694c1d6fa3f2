"""Full tensors gathered from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program, Schedule, ScheduleError, ShardSpec, is_sharded, parameter_facts, raise_on_all_ranks, shard_spec

from .gradients import compare_gradients, plain

State = dict[str, torch.Tensor | None]
Read = Callable[[torch.Tensor], torch.Tensor | None]


def full_state(schedule: Schedule, kind: str = "param") -> State:
    """Return full tensors under the unmodified model's names, on every rank. Collective.

    A tied parameter is under each of its names; if several stages hold it, it is taken from the first one.

    Args:
        schedule: Any handle of the schedule.
        kind: ``"param"``, ``"grad"`` (None for a parameter without a gradient) or ``"buffer"``.

    Returns:
        Detached tensors by original name.
    """
    program = schedule.program
    module = program.module if program is not None else schedule.root_module
    if kind not in ("param", "grad", "buffer"):
        raise ScheduleError(f"kind is {kind!r}; give 'param', 'grad' or 'buffer'", primitive="full_state")
    if kind == "grad":
        _refuse_parts(module, program)
    read: Read = (lambda tensor: tensor.grad) if kind == "grad" else (lambda tensor: tensor)
    named = dict(module.named_buffers() if kind == "buffer" else module.named_parameters())
    owners, keys = _owners(program), original_keys(named.items())
    full = {name: _from_stage(tensor, read, program, owners.get(name, 0 if owners else None)) for name, tensor in named.items()}
    return {key: full[name] for name in named for key in keys[name]}


def original_keys(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return each tensor's original names by its current name; a tensor that a primitive added has its current name.

    Raises:
        ScheduleError: two tensors have the same original name.
    """
    keys = {name: parameter_facts(tensor).names or (name,) for name, tensor in named}
    taken: dict[str, str] = {}
    for name, key in ((name, key) for name, own in keys.items() for key in own):
        if (other := taken.setdefault(key, name)) != name:
            both = f"{other!r} and {name!r} are both {key!r} of the unmodified model"
            raise ScheduleError(f"{both}; give the one that a step brought in another name")
    return keys


def _refuse_parts(module: nn.Module, program: Program | None) -> None:
    """Refuse partial gradients of unsharded parameters, since they are not summed here."""
    held = {name: parameter for name, parameter in module.named_parameters() if not parameter.is_meta}
    whole = {name: each for name, each in held.items() if each.requires_grad and not is_sharded(each)}
    wrong, _ = compare_gradients(held, whole)
    error = ScheduleError(wrong, primitive="full_state") if wrong else None
    raise_on_all_ranks(error, program.mesh if program is not None else None)


def _owners(program: Program | None) -> dict[str, int]:
    """Return the rank of the first stage that has each parameter or buffer, by current name; empty without stages."""
    if program is None or program.axis_size("pp") == 1:
        return {}
    walks = [(s.index, walk) for s in reversed(program.stages) for walk in (s.module.named_parameters, s.module.named_buffers)]
    return {name: program.rank_of(index) for index, walk in walks for name, _ in walk(remove_duplicate=False)}


def _from_stage(parameter: torch.Tensor, read: Read, program: Program | None, rank: int | None) -> Any:
    if rank is None or program is None or program.mesh is None:  # every rank has it
        return over_group(parameter, read)
    group = program.mesh.get_group("pp")
    full = over_group(parameter, read) if dist.get_rank(group) == rank else None
    return _broadcast(full, group, dist.get_global_rank(group, rank), torch.device(program.mesh.device_type))


def _broadcast(full: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    """Broadcast a tensor with its shape and dtype, which may have changed since the build; None stays None."""
    inner, context = full.__tensor_flatten__() if hasattr(full, "__tensor_flatten__") else ((), None)  # quantised
    told: list[Any] = [None if full is None else (inner and type(full), full.shape, full.stride(), full.dtype, inner, context)]
    dist.broadcast_object_list(told, source, group=group, device=device)
    if told[0] is None:
        return None
    cls, shape, stride, dtype, inner, context = told[0]
    if inner:
        parts = {name: _broadcast(getattr(full, name, None), group, source, device) for name in inner}
        return cls.__tensor_unflatten__(parts, context, shape, stride) if full is None else full
    buffer = full.contiguous() if full is not None else torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(buffer.flatten().view(torch.uint8), source, group=group)  # gloo has no float8
    return buffer


def over_group(parameter: torch.Tensor, read: Read) -> torch.Tensor | None:
    """Return the full tensor of ``read(parameter)``; None if no rank of the group has one. Collective."""
    local, spec = plain(read(parameter)), shard_spec(parameter)
    if spec is None or not is_sharded(parameter):
        return local.clone() if local is not None else None
    present = torch.tensor(local is not None, dtype=torch.uint8, device=parameter.device)
    dist.all_reduce(present, group=spec.group)
    if not present.item():
        return None
    return gather_parts(local if local is not None else torch.zeros_like(parameter), spec)


def gather_parts(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Gather the shards of all ranks to the full tensor. Collective over the group of the shards."""
    missing = max(spec.sizes) - spec.sizes[spec.rank]
    mine = nn.functional.pad(local, [0, 0] * (local.dim() - 1 - spec.dim) + [0, missing]) if missing else local.contiguous()
    shards = [torch.empty_like(mine) for _ in range(spec.num_shards)]
    dist.all_gather(shards, mine, group=spec.group)
    return spec.assemble(shards)
