"""Check of the properties that a step must keep, except those that the example declares as changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule, parameter_facts
from slapo_training.distributed import full_state

from ..examples.case import Case, ConformanceError
from .replicas import check_replicas


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
            if not _same(other, tensor):
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


def _same(found: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return found is not None and found.dtype == tensor.dtype and torch.equal(found, tensor)


def _text(tensor: Any) -> str:
    return f"a {tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else "missing"
