"""``replace``: another module in the place of a module, or of a matched subgraph of a traced one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..interfaces.primitive import Primitive
from ..modules.hook_tables import HOOK_TABLES
from ..modules.parameters import parameter_facts
from ..reporting.errors import ScheduleError, UnknownNameError

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class ReplacePrimitive(Primitive):
    """Put a module in the place of this one, or of a subgraph that ``find`` matched in this traced module.

    Rewrite:
        sch["act"].replace(new):          parent(act=old)   -->  parent(act=new)
        sch.replace(new, match):          y = a(b(x))       -->  y = new(x)
        sch.replace(new, pattern):        every y = a(b(x)) -->  y = new(x)

    A replaced module's hooks, training mode and ``requires_grad`` carry over, each parameter of ``new`` with the name and
    shape of an old one takes its original name and the attributes in ``param_tags``, unless the old one lives on inside of
    ``new``, and a module that several places share is replaced at all of them. Replacing one holder of a tied parameter ends
    the tie there.

    ``new`` runs where the subgraph's last operation was. If it draws random numbers, dropouts between the subgraph's
    operations draw before it: their masks are other ones than the unmodified model's for the same seed, and as random.

    Args:
        new: The module; for a subgraph also a function of the subgraph's inputs.
        subgraph: One match, or a list of matches, of ``sch.find``; or what ``sch.find`` takes, for all that it finds. Several
            matches share ``new``, which must then hold no parameters and no buffers.
        name: Name of the new submodule in the traced module; default: made from its class. ``sch["FusedQKV_0"]`` finds the
            first of this class or name there, ``sch["FusedQKV_1"]`` the second.

    Raises:
        ScheduleError: not a module; the subgraph is gone, has a value used outside it, or does not fit.
    """

    name = "replace"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, new: Any, subgraph: Any = None, name: str | None = None) -> Any:
        """Refuse what cannot stand in this place; find the subgraphs."""
        if subgraph is None:
            check_module(schedule, new, "replace")
            return None
        return _on_subgraphs(schedule).check(schedule, new, subgraph, name)

    @staticmethod
    def apply(schedule: Schedule, new: Any, subgraph: Any = None, name: str | None = None) -> None:
        """Swap."""
        if subgraph is None:
            swap(schedule, new)
            return
        _on_subgraphs(schedule).apply(schedule, new, subgraph, name)


def _on_subgraphs(schedule: Schedule) -> type[Primitive]:
    """Return what replaces subgraphs, which the package that traces provides."""
    try:
        return cast("type[Primitive]", schedule.registry.get("subgraph primitive", "replace"))
    except UnknownNameError as err:
        needed = "a subgraph is part of a traced graph, which slapo-tracing makes; pip install slapo-tracing"
        raise ScheduleError(needed, path=schedule.path, primitive="replace") from err


def check_module(schedule: Schedule, new: Any, primitive: str) -> None:
    """Refuse what is no module, is the module itself, or is already somewhere else in the model."""
    if not isinstance(new, nn.Module):
        raise ScheduleError(f"{new!r} is no module; give an nn.Module", path=schedule.path, primitive=primitive)
    if any(module is schedule.root_module for module in new.modules()) and schedule.path:
        raise ScheduleError("the new module contains the whole model", path=schedule.path, primitive=primitive)


def swap(schedule: Schedule, new: nn.Module) -> None:
    """Put ``new`` in the schedule's place and carry over what belongs to the place."""
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
    """The parameters of ``new`` take over from those they replaced, but not from one that lives on inside of ``new``."""
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
    """All names; where a tie ends, as the old parameter lives on elsewhere, those of the places it lost."""
    parameter_facts(parameter).names = names = parameter_facts(was).names
    if schedule.places_of(was):
        held = dict(schedule.root_module.named_parameters(remove_duplicate=False))
        parameter_facts(parameter).names = tuple(name for name in names if held.get(name) is parameter)
        parameter_facts(was).names = tuple(name for name in names if held.get(name) is not parameter)
