"""``sch.offload()``: what a module keeps for its backward pass waits in CPU memory."""

from __future__ import annotations

from torch import nn

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.nodes import forward_wrappers, wrap_forward

from .forward_wrappers.cpu_offload import Offloaded
from .module_lists import listed_in

MIN_BYTES = 2**20


class OffloadPrimitive(Primitive):
    """Move what autograd keeps of this module, or of each module of a list, to CPU memory until the backward pass needs it.

    Rewrite:
        sch["mlp"].offload():   y = mlp(x), keeps activations   -->   y = mlp(x), keeps copies of them in CPU memory

    Parameters and buffers of the model stay where they are, and so do tensors of a class of their own, as DTensor. What several
    views share is moved once. On a GPU the copies go to pinned memory and back on a stream of their own, and the backward of
    one module brings back what the one called before it has moved. With ``checkpoint``, in either order, what the checkpoint
    keeps of its inputs is moved; what its policy or budget keeps stays. Without gradients the forward just runs.

    Args:
        min_bytes: Memory smaller than this stays; 1 MiB by default.

    Raises:
        ScheduleError: offloaded already, a container that has no forward, an empty list, or a number that is none.
    """

    name = "offload"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, *, min_bytes: int = MIN_BYTES) -> list[Schedule]:
        """The modules."""
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
            raise _error(schedule, f"min_bytes is {min_bytes!r}; give a number of bytes, 0 to move everything")
        listed = listed_in(schedule)
        if listed == []:
            raise _error(schedule, "the list is empty; there is nothing to offload")
        chosen = listed or [schedule]
        for each in chosen:
            _check_module(each)
        return chosen

    @staticmethod
    def apply(schedule: Schedule, *, min_bytes: int = MIN_BYTES, checked: list[Schedule]) -> None:
        for chosen in checked:
            schedule.touch(chosen.mod)
            wrap_forward(chosen.mod, Offloaded(min_bytes))


def _check_module(schedule: Schedule) -> None:
    mod = schedule.mod
    if any(isinstance(wrapper, Offloaded) for wrapper in forward_wrappers(mod)):
        raise _error(schedule, "is offloaded already; once is enough")
    if type(mod).forward is nn.Module.forward and "forward" not in mod.__dict__:
        raise _error(schedule, f"a {type(mod).__name__} has no forward of its own; offload the modules in it")


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="offload")
