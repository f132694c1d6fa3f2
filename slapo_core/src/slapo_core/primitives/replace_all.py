"""``replace_all``: replace every module of a class, or that a glob matches, in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from .. import paths
from ..errors import ScheduleError
from ..primitive import Primitive
from .replace import check_module, swap

if TYPE_CHECKING:
    from ..schedule import Schedule


class ReplaceAllPrimitive(Primitive):
    """Replace every module below this one that ``target`` names; one inside another that is replaced stays as it is.

    Rewrite:
        every old matching target  -->  make(old)

    Args:
        target: A module class (subclasses do not count) or a glob of paths, ``**`` crosses dots.
        make: Called with each old module, returns the new one. Give an importable function or class to save the schedule.

    Raises:
        ScheduleError: nothing matches, or ``make`` does not return a module.
    """

    name = "replace_all"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, target: type[nn.Module] | str, make: Callable[[nn.Module], nn.Module]) -> None:
        """Refuse a target that matches nothing."""
        if not callable(make):
            raise ScheduleError(f"{make!r} cannot be called to make a module", path=schedule.path, primitive="replace_all")
        if not _targets(schedule, target):
            raise ScheduleError(f"nothing below matches {target!r}", path=schedule.path, primitive="replace_all")

    @staticmethod
    def apply(schedule: Schedule, target: type[nn.Module] | str, make: Callable[[nn.Module], nn.Module]) -> None:
        """Make and swap each; several places of one module get one new module."""
        for handle in _targets(schedule, target):
            for module in handle.mod.modules():
                schedule.touch(module)  # make may change the old module instead of making a new one
            new = make(handle.mod)
            check_module(handle, new, "replace_all")
            swap(handle, new)


def _targets(schedule: Schedule, target: type[nn.Module] | str) -> list[Schedule]:
    if isinstance(target, str):
        names = [name for name, _ in paths.select(schedule.mod, target)]
    else:
        names = [name for name, module in schedule.mod.named_modules() if name and type(module) is target]
    outermost: dict[str, None] = {}
    seen: set[int] = set()
    for name in sorted(set(names), key=lambda path: path.count(".")):
        parts = name.split(".")
        inside = any(".".join(parts[:end]) in outermost for end in range(1, len(parts)))
        module = paths.find(schedule.mod, name)
        if not inside and id(module) not in seen:
            outermost[name] = None
            seen.add(id(module))
    return [schedule[name] for name in names if name in outermost]
