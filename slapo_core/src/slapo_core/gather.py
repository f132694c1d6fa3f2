"""Full tensors from the pieces the ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from .agreement import agree
from .errors import ScheduleError
from .parameters import ShardSpec, facts, is_part, plain, shard_spec
from .program import Program
from .whole_gradients import compare_gradients

State = dict[str, torch.Tensor | None]
Read = Callable[[torch.Tensor], torch.Tensor | None]


def full_state(module: nn.Module, program: Program | None, kind: str) -> State:
    """Full parameters, gradients or buffers under original names, equal on every rank; see ``Schedule.full_state``.

    A tied parameter whose copies sit in several stages is taken from the first.
    """
    if kind not in ("param", "grad", "buffer"):
        raise ScheduleError(f"kind is {kind!r}; give 'param', 'grad' or 'buffer'", primitive="full_state")
    if kind == "grad":
        _refuse_parts(module, program)
    read: Read = (lambda tensor: tensor.grad) if kind == "grad" else (lambda tensor: tensor)
    named = dict(module.named_buffers() if kind == "buffer" else module.named_parameters())
    owners, keys = _owners(program), original_keys(named.items())
    state: State = {}
    for name, tensor in named.items():
        full = _from_stage(tensor, read, program, owners.get(name, 0)) if program and owners else over_group(tensor, read)
        state.update(dict.fromkeys(keys[name], full))
    return state


def original_keys(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Each tensor's names in the unmodified model by its current name, which is what one that a step brought in has.

    Raises:
        ScheduleError: two tensors have one name.
    """
    keys = {name: facts(tensor).names or (name,) for name, tensor in named}
    taken: dict[str, str] = {}
    for name, key in ((name, key) for name, own in keys.items() for key in own):
        if (other := taken.setdefault(key, name)) != name:
            both = f"{other!r} and {name!r} are both {key!r} of the unmodified model"
            raise ScheduleError(f"{both}; give the one that a step brought in another name")
    return keys


def _refuse_parts(module: nn.Module, program: Program | None) -> None:
    """Nobody sums the gradients of whole parameters here, so they must be whole as well."""
    held = {name: parameter for name, parameter in module.named_parameters() if not parameter.is_meta}
    whole = {name: parameter for name, parameter in held.items() if parameter.requires_grad and not is_part(parameter)}
    wrong, _ = compare_gradients(held, whole)
    agree(ScheduleError(wrong, primitive="full_state") if wrong else None, program.mesh if program is not None else None)


def _owners(program: Program | None) -> dict[str, int]:
    """Current name of a parameter or buffer to the rank of the first stage that has it; empty where every rank has all."""
    if program is None or program.axis_size("pp") == 1:
        return {}
    stages = reversed(program.stages)
    walks = [(stage.index, walk) for stage in stages for walk in (stage.module.named_parameters, stage.module.named_buffers)]
    return {name: program.rank_of(index) for index, walk in walks for name, _ in walk(remove_duplicate=False)}


def _from_stage(parameter: torch.Tensor, read: Read, program: Program, rank: int) -> torch.Tensor | None:
    assert program.mesh is not None
    group = program.mesh.get_group("pp")
    full = over_group(parameter, read) if dist.get_rank(group) == rank else None
    source = dist.get_global_rank(group, rank)
    device = torch.device(program.mesh.device_type)
    present = torch.tensor(full is not None, dtype=torch.uint8, device=device)
    dist.broadcast(present, source, group=group)
    if not present.item():
        return None
    shape = spec.full_shape if (spec := shard_spec(parameter)) else tuple(parameter.shape)
    buffer = full.contiguous() if full is not None else torch.empty(shape, dtype=parameter.dtype, device=device)
    dist.broadcast(buffer, source, group=group)
    return buffer


def over_group(parameter: torch.Tensor, read: Read) -> torch.Tensor | None:
    """The full tensor of what ``read`` gives for a parameter; None where no rank of its group has any. Collective."""
    local, spec = plain(read(parameter)), shard_spec(parameter)
    if spec is None or not is_part(parameter):
        return local.clone() if local is not None else None
    present = torch.tensor(local is not None, dtype=torch.uint8, device=parameter.device)
    dist.all_reduce(present, group=spec.group)
    if not present.item():
        return None
    return gather_parts(local if local is not None else torch.zeros_like(parameter), spec)


def gather_parts(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return the full tensor from the parts of all ranks. Collective over the group of the shards."""
    mine = local.contiguous()
    if missing := max(spec.sizes) - spec.sizes[spec.rank]:
        mine = nn.functional.pad(mine, [0, 0] * (mine.dim() - 1 - spec.dim) + [0, missing])
    shards = [torch.empty_like(mine) for _ in range(spec.num_shards)]
    dist.all_gather(shards, mine, group=spec.group)
    return spec.assemble(shards)
