"""Primitives that a list of modules takes for each module in it."""

from __future__ import annotations

from torch import nn

from slapo_core import Schedule


def listed_in(schedule: Schedule, opens_sequential: bool = False) -> list[Schedule] | None:
    """The modules of a list without a forward of its own, each once; None where the module is something else.

    Args:
        schedule: Of the list.
        opens_sequential: Whether an ``nn.Sequential`` counts as a list, too.
    """
    mod = schedule.mod
    is_list = isinstance(mod, (nn.ModuleList, nn.ModuleDict)) and type(mod).forward is nn.Module.forward
    if not is_list and not (opens_sequential and isinstance(mod, nn.Sequential)):
        return None
    return [*{id(child.mod): child for child in schedule.child.values()}.values()]
