"""Take some of a schedule's steps again, on a fresh copy of the unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from slapo_core import Schedule, ScheduleError, Step, create_schedule, is_sharded, round_trip

from .model_copies import copied


def fresh_schedule(reference: nn.Module, like: Schedule) -> Schedule:
    """A schedule without steps of a copy of the reference, in the mode and on the ranks of another one."""
    model = copied(reference).train(like.mod.training)
    return create_schedule(model, group=like.group, mesh=like.mesh, example_inputs=like.example_inputs, plugins=like.registry)


def replay(fresh: Schedule, steps: Iterable[Step]) -> Schedule:
    """Take steps of another schedule on a fresh one, which is returned.

    Raises:
        ScheduleError: a step cannot be taken again, or not without those that are left out.
    """
    for step in steps:
        handle = fresh[step.path] if step.path else fresh
        args = [_again(value, fresh) for value in step.args]
        handle.apply(step.name, *args, **{name: _again(value, fresh) for name, value in step.kwargs.items()})
    return fresh


def _again(value: Any, schedule: Schedule) -> Any:
    """An argument for another schedule: modules are copied, matches found there, what is immutable stays."""
    if isinstance(value, nn.Module):
        if any(is_sharded(each) for each in value.parameters()):
            raise ScheduleError(f"a {type(value).__qualname__} that a step brought in has been sharded since")
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {key: _again(each, schedule) for key, each in value.items()}
    try:
        return round_trip(value, schedule)
    except ScheduleError:
        return type(value)(_again(each, schedule) for each in value) if type(value) in (list, tuple) else value
