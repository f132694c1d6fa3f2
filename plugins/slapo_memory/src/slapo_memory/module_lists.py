"""Modules to which a primitive applies: a module, or the members of a list."""

from __future__ import annotations

from torch import nn

from slapo_core import Schedule, ScheduleError
from slapo_tracing.tracers import is_container


def modules_of_list(schedule: Schedule, opens_sequential: bool = False) -> list[Schedule] | None:
    """Return the members of a module list without a forward of its own, each once; None for any other module.

    With ``opens_sequential``, an ``nn.Sequential`` counts as a list.
    """
    if not is_container(schedule.mod) and not (opens_sequential and isinstance(schedule.mod, nn.Sequential)):
        return None
    return [*{id(child.mod): child for child in schedule.child.values()}.values()]


def check_module(schedule: Schedule, primitive: str, is_wrapped: bool) -> None:
    """Raise ``ScheduleError`` if a module is wrapped already, or is a container without a forward."""
    done = "checkpointed" if primitive == "checkpoint" else "offloaded"
    what = f"is {done} already; once is enough" if is_wrapped else None
    if type(schedule.mod).forward is nn.Module.forward and "forward" not in schedule.mod.__dict__:
        what = f"a {type(schedule.mod).__name__} has no forward of its own; {primitive} the modules in it"
    if what is not None:
        raise ScheduleError(what, path=schedule.path, primitive=primitive)
