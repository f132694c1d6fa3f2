"""``sch.offload()``: saved tensors of a module wait for the backward pass in CPU memory."""

from __future__ import annotations

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.nodes import forward_wrappers, wrap_forward

from .forward_wrappers.cpu_offload import OffloadWrapper
from .module_lists import check_module, modules_of_list

MIN_BYTES = 2**20


class OffloadPrimitive(Primitive):
    """Move the tensors that autograd saves in this module, or in each module of a list, to CPU memory until the backward.

    Rewrite:
        sch["mlp"].offload():   y = mlp(x), keeps activations   -->   y = mlp(x), keeps copies of them in CPU memory

    Parameters and buffers of the model stay, and so do tensor subclasses such as DTensor. Memory that several views share is
    moved once. On a GPU, copies use pinned memory and a stream of their own, and the backward of one module prefetches the
    tensors of the module that was called before it. With ``checkpoint``, in either order, the saved inputs are moved, and
    tensors that its policy or budget keeps stay. Without gradients the wrapper has no effect.

    Args:
        min_bytes: Storages with fewer bytes stay; 1 MiB by default.

    Raises:
        ScheduleError: offloaded already, a container that has no forward, an empty list, or an invalid number.
    """

    name = "offload"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, *, min_bytes: int = MIN_BYTES) -> list[Schedule]:
        """Return the schedules of the modules to wrap."""
        if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
            raise _error(schedule, f"min_bytes is {min_bytes!r}; give a number of bytes, 0 to move everything")
        listed = modules_of_list(schedule)
        if listed == []:
            raise _error(schedule, "the list is empty; there is nothing to offload")
        chosen = listed or [schedule]
        for each in chosen:
            wrappers = forward_wrappers(each.mod)
            check_module(each, "offload", any(isinstance(wrapper, OffloadWrapper) for wrapper in wrappers))
        return chosen

    @staticmethod
    def apply(schedule: Schedule, *, min_bytes: int = MIN_BYTES, checked: list[Schedule]) -> None:
        for chosen in checked:
            schedule.touch(chosen.mod)
            wrap_forward(chosen.mod, OffloadWrapper(min_bytes))


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="offload")
