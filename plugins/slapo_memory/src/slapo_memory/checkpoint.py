"""``sch.checkpoint()``: recompute a module's activations in the backward pass instead of keeping them."""

from __future__ import annotations

from torch import nn

from slapo_core.errors import ScheduleError
from slapo_core.primitive import Primitive
from slapo_core.schedule import Schedule
from slapo_core.wrapping import forward_wrappers, wrap_forward

from .recompute import checkpointed


class CheckpointPrimitive(Primitive):
    """Keep only the inputs of this module for the backward pass, and run its forward again there.

    Rewrite:
        y = forward(x)  -->  y = checkpoint(forward, x)

    Random states, the tracked ones included, and autocast are as in the forward. Hooks of the module stay outside, so
    collectives that ``sync`` puts on it run once. Without gradients the forward just runs.

    Raises:
        ScheduleError: already checkpointed, or a container that has no forward.
    """

    name = "checkpoint"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule) -> None:
        mod = schedule.mod
        if checkpointed in forward_wrappers(mod):
            raise _error(schedule, "is checkpointed already; once is enough")
        if type(mod).forward is nn.Module.forward and "forward" not in mod.__dict__:
            raise _error(schedule, f"a {type(mod).__name__} has no forward of its own; checkpoint the modules in it")

    @staticmethod
    def apply(schedule: Schedule) -> None:
        wrap_forward(schedule.mod, checkpointed)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="checkpoint")
