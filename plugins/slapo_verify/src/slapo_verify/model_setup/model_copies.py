"""Copies of models that keep the gradient hooks and the attributes of their parameters, and replay of steps on copies."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from slapo_core import Schedule, ScheduleError, Step, create_schedule, is_sharded, round_trip

T = TypeVar("T", nn.Module, Schedule)


def copy_model(value: T) -> T:
    """Copy a model, or a schedule with its model, with the hooks and attributes of its parameters.

    ``copy.deepcopy`` drops both, and a copy without them trains differently. The copies share them: a hook that refers to a
    parameter of the original still does.
    """
    made = copy.deepcopy(value)
    old, new = (each.mod if isinstance(each, Schedule) else each for each in (value, made))
    for one, other in zip(old.parameters(), new.parameters(), strict=True):
        vars(other).update({name: each for name, each in vars(one).items() if name not in vars(other)})
        _copy_hooks(one, other)
    return made


def _copy_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    if not new.requires_grad:
        return
    if not new._backward_hooks:
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
    if not new._post_accumulate_grad_hooks:
        for hook in (old._post_accumulate_grad_hooks or {}).values():
            new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def fresh_schedule(reference: nn.Module, like: Schedule) -> Schedule:
    """Return a schedule without steps of a copy of the reference, with the mode and ranks of another schedule."""
    model = copy_model(reference).train(like.mod.training)
    return create_schedule(model, group=like.group, mesh=like.mesh, example_inputs=like.example_inputs, plugins=like.registry)


def replay(fresh: Schedule, steps: Iterable[Step]) -> Schedule:
    """Take steps of another schedule on ``fresh`` and return it; raise ``ScheduleError`` if one cannot be taken again."""
    for step in steps:
        handle = fresh[step.path] if step.path else fresh
        args = [_replay_argument(value, fresh) for value in step.args]
        handle.apply(step.name, *args, **{name: _replay_argument(value, fresh) for name, value in step.kwargs.items()})
    return fresh


def _replay_argument(value: Any, schedule: Schedule) -> Any:
    """Return an argument for another schedule: modules are copied, matches looked up, immutable values kept."""
    if isinstance(value, nn.Module):
        if any(is_sharded(each) for each in value.parameters()):
            raise ScheduleError(f"a {type(value).__qualname__} that a step brought in has been sharded since")
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {key: _replay_argument(each, schedule) for key, each in value.items()}
    try:
        return round_trip(value, schedule)
    except ScheduleError:
        return type(value)(_replay_argument(each, schedule) for each in value) if type(value) in (list, tuple) else value
