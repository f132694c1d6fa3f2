"""``replace``: put another module in the place of a module, or of a matched subgraph of a traced one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..interfaces.primitive import Primitive
from ..modules.holders import HOOK_TABLES
from ..modules.parameters import parameter_facts
from ..reporting.errors import ScheduleError, UnknownNameError

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class ReplacePrimitive(Primitive):
    """Replace this module, or a subgraph that ``find`` matched in this traced module.

    Rewrite:
        sch["act"].replace(new):          parent(act=old)   -->  parent(act=new)
        sch.replace(new, match):          y = a(b(x))       -->  y = new(x)
        sch.replace(new, pattern):        every y = a(b(x)) -->  y = new(x)

    The new module takes over hooks, training mode and ``requires_grad``. Each parameter of ``new`` with the name and shape of
    an old one takes over its original name and the attributes in ``param_tags``, unless ``new`` contains the old parameter. A
    shared module is replaced at all its places. Replacing one holder of a tied parameter ends the tie there.

    ``new`` runs at the place of the subgraph's last operation. If it draws random numbers, dropouts between the subgraph's
    operations draw before it. Their masks then differ from the unmodified model's for the same seed, with the same
    distribution.

    Args:
        new: The module; for a subgraph also a function of the subgraph's inputs.
        subgraph: One match or a list of matches of ``sch.find``; or an argument of ``sch.find``, for all its matches. Several
            matches share ``new``, which must then have no parameters and no buffers.
        name: Name of the new submodule in the traced module; default: made from its class. ``sch["FusedQKV_0"]`` is the first
            of this class or name there, ``sch["FusedQKV_1"]`` the second.

    Raises:
        ScheduleError: not a module; the subgraph no longer exists, has a value used outside it, or does not fit.
    """

    name = "replace"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, new: Any, subgraph: Any = None, name: str | None = None) -> Any:
        """Refuse a module that does not fit; return the matched subgraphs."""
        if subgraph is None:
            check_module(schedule, new, "replace")
            return None
        return _subgraph_primitive(schedule).check(schedule, new, subgraph, name)

    @staticmethod
    def apply(schedule: Schedule, new: Any, subgraph: Any = None, name: str | None = None, *, checked: Any) -> None:
        """Replace the module or the subgraphs."""
        if subgraph is None:
            swap_module(schedule, new)
        else:
            _subgraph_primitive(schedule).apply(schedule, new, subgraph, name, checked=checked)


def _subgraph_primitive(schedule: Schedule) -> type[Primitive]:
    """Return the implementation of ``replace`` on subgraphs, which the package for tracing provides."""
    try:
        return cast("type[Primitive]", schedule.registry.get("subgraph primitive", "replace"))
    except UnknownNameError as err:
        needed = "a subgraph is part of a traced graph, which slapo-tracing makes; pip install slapo-tracing"
        raise ScheduleError(needed, path=schedule.path, primitive="replace") from err


def check_module(schedule: Schedule, new: Any, primitive: str) -> None:
    """Refuse an object that is not a module, and a module that contains the whole model."""
    if not isinstance(new, nn.Module):
        raise ScheduleError(f"{new!r} is not a module; give an nn.Module", path=schedule.path, primitive=primitive)
    if any(module is schedule.root_module for module in new.modules()) and schedule.path:
        raise ScheduleError("the new module contains the whole model", path=schedule.path, primitive=primitive)


def swap_module(schedule: Schedule, new: nn.Module) -> None:
    """Put ``new`` in the schedule's place, and carry over hooks, training mode and parameter facts."""
    old = schedule.mod
    if new is old:
        return
    for module in new.modules():
        schedule.touch(module)
    if all(module is not old for module in new.modules()):
        for table in HOOK_TABLES:
            getattr(new, table).update(getattr(old, table))
        new._is_full_backward_hook = new._is_full_backward_hook or old._is_full_backward_hook
    if new.training != old.training:
        new.train(old.training)
    schedule.replace_module(new)
    _carry_parameters(schedule, old, new)


def _carry_parameters(schedule: Schedule, old: nn.Module, new: nn.Module) -> None:
    """Carry facts over to the parameters of ``new``, except from old parameters that ``new`` contains."""
    former = dict(old.named_parameters(remove_duplicate=False))
    tags = {tag for known in schedule._root.metadata.values() for tag in known.param_tags}
    kept = {id(parameter) for parameter in new.parameters()}
    for name, parameter in new.named_parameters(remove_duplicate=False):
        was = former.get(name)
        if was is None or id(was) in kept:
            continue
        if not parameter_facts(parameter).names and was.shape == parameter.shape:
            _carry_names(schedule, was, parameter)
            for tag in tags & vars(was).keys() - vars(parameter).keys():
                setattr(parameter, tag, vars(was)[tag])
        if parameter.is_floating_point():
            parameter.requires_grad_(was.requires_grad)


def _carry_names(schedule: Schedule, was: nn.Parameter, parameter: nn.Parameter) -> None:
    """Carry all names over; where a tie ends, since the old parameter is held elsewhere, only those of the replaced places."""
    parameter_facts(parameter).names = names = parameter_facts(was).names
    if schedule.places_of(was):
        held = dict(schedule.root_module.named_parameters(remove_duplicate=False))
        parameter_facts(parameter).names = tuple(name for name in names if held.get(name) is parameter)
        parameter_facts(was).names = tuple(name for name in names if held.get(name) is not parameter)
