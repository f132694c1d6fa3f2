"""Checks of the properties that a step must keep, except those that the example declares as changed, and of deep copies."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core import Schedule, is_sharded, parameter_facts
from slapo_tracing.nodes import forward_wrappers
from slapo_training.distributed import full_state

from ..examples.case import Case, ConformanceError


def contracts(case: Case) -> None:
    """Check that parameters keep names, values, ties and ``requires_grad``, modules their mode, and that weights can be
    loaded.
    """
    broken = dict[str, str]()
    for training in (True, False):
        mine = replace(case, training=training)
        before, schedule = _ModelFacts(mine.model()), mine.make_schedule()
        for what, sentence in _violations(before, schedule, training):
            broken.setdefault(what, sentence)
        check_replicas(schedule)
    declared = {*case.example.changes}
    for what, sentence in broken.items():
        if what not in declared:
            raise ConformanceError(f"{sentence}; if that is meant, the example says changes=({what!r},)")
    if unmet := sorted(declared - {*broken}):
        raise ConformanceError(f"the example says that the step changes {', '.join(unmet)}, which it does not")


class _ModelFacts:
    """Properties of a model that a step must keep.

    Args:
        model: The unmodified model.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters(remove_duplicate=False))
        self.values = {name: tensor.detach().clone() for name, tensor in named.items()}
        self.requires_grad = {name: tensor.requires_grad for name, tensor in named.items()}
        self.ties = _ties({name: id(tensor) for name, tensor in named.items()})
        self.keys = {*model.state_dict()}
        self.modes = {path: module.training for path, module in model.named_modules()}


def _ties(owners: dict[str, int]) -> set[frozenset[str]]:
    """Return the sets of names of tied parameters."""
    names: dict[int, set[str]] = {}
    for name, owner in owners.items():
        names.setdefault(owner, set()).add(name)
    return {frozenset(found) for found in names.values() if len(found) > 1}


def _violations(before: _ModelFacts, schedule: Schedule, training: bool) -> Iterator[tuple[str, str]]:
    """Yield each changed property, with a sentence."""
    model = schedule.mod
    held = [(name, tensor) for tensor in model.parameters() for name in parameter_facts(tensor).names]
    found = dict(held)
    if lost := sorted(before.values.keys() - found.keys()):
        yield "names", f"no parameter has the original name {lost[0]!r} any more"
    broken = [tie for tie in before.ties if len({id(tensor) for name, tensor in held if name in tie}) > 1]
    if broken:
        yield "ties", f"{' and '.join(sorted(broken[0]))} are no longer one parameter"
    values = _values(schedule, held, before) if found else {}
    for name, tensor in before.values.items():
        for other in values.get(name, [None]) if name in found else ():
            if other is None or other.dtype != tensor.dtype or not torch.equal(other, tensor):
                yield "values", f"the full parameter {name!r} is {_text(other)}, not {_text(tensor)} of the same values"
        if name in found and found[name].requires_grad != before.requires_grad[name]:
            yield "requires_grad", f"requires_grad of {name!r} is {found[name].requires_grad}, which it was not"
    yield from _module_violations(before, model, training)


def _values(
    schedule: Schedule, held: Sequence[tuple[str, torch.Tensor]], before: _ModelFacts
) -> Mapping[str, Sequence[torch.Tensor | None]]:
    """Return the full parameters by name. Shards of several parameters with one name cannot be assembled and are skipped."""
    names = [name for name, _ in held]
    if len(names) == len({*names}):
        return {name: [tensor] for name, tensor in full_state(schedule).items()}
    parts = {name for name, tensor in held if parameter_facts(tensor).spec is not None}
    return {
        name: [tensor.detach() for own, tensor in held if own == name] if name not in parts else [before.values[name]]
        for name in before.values
    }


def _module_violations(before: _ModelFacts, model: nn.Module, training: bool) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        if module.training != before.modes.get(path, training):
            yield "training", f"the module {path!r} is {'in' if module.training else 'not in'} training mode, which is wrong"
    keys = {*model.state_dict()}
    if keys != before.keys:
        changed = sorted(keys ^ before.keys)[0]
        yield "state_dict", f"the key {changed!r} of the state_dict {'is new' if changed in keys else 'is gone'}"
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())


def _text(tensor: Any) -> str:
    return f"a {tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "missing"


def check_deepcopy(case: Case) -> None:
    """Check that a deep copy of the scheduled model computes the same, keeps parameter facts, and shares no memory."""
    schedule = case.make_schedule()
    copied = copy.deepcopy(schedule.mod)
    tensors = dict(schedule.mod.named_parameters(remove_duplicate=False))
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        copied_facts, facts = parameter_facts(parameter), parameter_facts(tensors[name])
        if (copied_facts.names, copied_facts.spec) != (facts.names, facts.spec):
            raise ConformanceError(f"a deep copy loses the facts of {name!r}")
    taken = {memory: what for what, tensor in _tensors(schedule.mod) if (memory := _memory(tensor))}
    for what, tensor in _tensors(copied):
        if _memory(tensor) in taken:
            raise ConformanceError(f"a deep copy shares {what} with the model")
    case.compare(schedule.mod, copied, "a deep copy of the model")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the mutable tensors: parameters, buffers, and tensors held by wrappers."""
    yield from ((repr(name), tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers()))
    for path, module in model.named_modules():
        for wrapper in forward_wrappers(module):
            for name, value in getattr(wrapper, "__dict__", {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of a wrapper of {path!r}", value


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, or several."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def check_replicas(schedule: Schedule) -> None:
    """Check that parameters without a shard specification are equal on all ranks. Collective.

    Raises:
        ConformanceError: on all ranks, if one differs.
    """
    if not dist.is_initialized() or dist.get_world_size(schedule.group) == 1:
        return
    mine = {name: _digest(tensor) for name, tensor in schedule.mod.named_parameters() if _is_whole(tensor)}
    found: list[Any] = [None] * dist.get_world_size(schedule.group)
    dist.all_gather_object(found, mine, group=schedule.group)
    for rank, theirs in enumerate(found):
        if apart := sorted(name for name, digest in found[0].items() if theirs.get(name, digest) != digest):
            what = f"the parameter {apart[0]!r}, which is not sharded,"
            raise ConformanceError(f"{what} differs between rank 0 and rank {rank}")


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is replicated and has values."""
    return not (is_sharded(tensor) or is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided)


def _digest(tensor: torch.Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()
    return hashlib.blake2b(bytes(numbers), digest_size=8).hexdigest() + str((tuple(tensor.shape), tensor.dtype))
