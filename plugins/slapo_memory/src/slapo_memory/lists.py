"""Primitives that a list of modules takes for each module in it."""

from __future__ import annotations

from torch import nn

from slapo_core.schedule import Schedule


def listed_in(schedule: Schedule) -> list[Schedule] | None:
    """The modules of a list without a forward of its own, each once; None where the module is something else."""
    mod = schedule.mod
    if not isinstance(mod, (nn.ModuleList, nn.ModuleDict)) or type(mod).forward is not nn.Module.forward:
        return None
    return [*{id(child.mod): child for child in schedule.child.values()}.values()]
