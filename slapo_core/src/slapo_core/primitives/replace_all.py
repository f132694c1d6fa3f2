"""``replace_all``: replace every module of a class, or that a glob matches, in one step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import nn

from ..interfaces.primitive import Primitive
from ..modules import paths
from ..reporting.errors import ScheduleError
from .replace import check_module, swap_module

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class ReplaceAllPrimitive(Primitive):
    """Replace every module below this one that ``target`` matches, and none inside a replaced one.

    Rewrite:
        every old matching target  -->  make(old)

    Args:
        target: A module class (subclasses do not match) or a glob of paths, in which ``**`` matches dots.
        make: Function of the old module that returns the new one, or of the path below this module and the old module. Pass an
            importable function or class to save the schedule.
        **kwargs: Keyword arguments of ``make``.

    Raises:
        ScheduleError: nothing matches, or ``make`` does not return a module.
    """

    name = "replace_all"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, target: type[nn.Module] | str, make: Callable[..., nn.Module], **kwargs: Any) -> None:
        """Refuse a target without matches, and a ``make`` that cannot be called."""
        if not callable(make):
            raise ScheduleError(f"{make!r} cannot be called to make a module", path=schedule.path, primitive="replace_all")
        if not _find_targets(schedule, target):
            raise ScheduleError(f"nothing below matches {target!r}", path=schedule.path, primitive="replace_all")
        _positional_count(schedule, make, kwargs)

    @staticmethod
    def apply(schedule: Schedule, target: type[nn.Module] | str, make: Callable[..., nn.Module], **kwargs: Any) -> None:
        """Make and put in each new module; a module with several places is made once."""
        count = _positional_count(schedule, make, kwargs)
        for path, handle in _find_targets(schedule, target).items():
            for module in handle.mod.modules():
                schedule.touch(module)  # make may change the old module instead of making a new one
            new = make(*(path, handle.mod)[-count:], **kwargs)
            check_module(handle, new, "replace_all")
            swap_module(handle, new)


def _positional_count(schedule: Schedule, make: Callable[..., nn.Module], kwargs: dict[str, Any]) -> int:
    """Return how many positional arguments ``make`` takes beside ``kwargs``: 1, the module, or 2, path and module."""
    for count in (1, 2):
        with suppress(TypeError):
            inspect.signature(make).bind(*range(count), **kwargs)
            return count
    wanted = f"is called with (module) or (path, module), and with {', '.join(kwargs) or 'nothing'} by name"
    raise ScheduleError(f"{make!r} {wanted}; give a function of these", path=schedule.path, primitive="replace_all")


def _find_targets(schedule: Schedule, target: type[nn.Module] | str) -> dict[str, Schedule]:
    outermost: dict[str, Schedule] = {}
    seen: set[int] = set()
    for name, module in paths.select(schedule.mod, target) if isinstance(target, str) else schedule.mod.named_modules():
        is_inside = not outermost.keys().isdisjoint(accumulate(name.split("."), paths.join))
        if name and (isinstance(target, str) or type(module) is target) and not is_inside and id(module) not in seen:
            outermost[name] = schedule[name]
            seen.add(id(module))
    return outermost
