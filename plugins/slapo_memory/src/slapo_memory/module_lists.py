"""Members of a module list, to which a primitive of the list applies."""

from __future__ import annotations

from torch import nn

from slapo_core import Schedule


def modules_of_list(schedule: Schedule, opens_sequential: bool = False) -> list[Schedule] | None:
    """Return the members of a module list without a forward of its own, each once; None for any other module.

    With ``opens_sequential``, an ``nn.Sequential`` counts as a list.
    """
    mod = schedule.mod
    is_list = isinstance(mod, (nn.ModuleList, nn.ModuleDict)) and type(mod).forward is nn.Module.forward
    if not is_list and not (opens_sequential and isinstance(mod, nn.Sequential)):
        return None
    return [*{id(child.mod): child for child in schedule.child.values()}.values()]
