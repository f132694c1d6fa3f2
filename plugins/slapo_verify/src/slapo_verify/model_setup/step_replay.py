"""Replay of some of a schedule's steps on a copy of the unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from slapo_core import Schedule, ScheduleError, Step, create_schedule, is_sharded, round_trip

from .model_copies import copy_model


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
