"""``replace``: another module in the place of a module, or of a matched subgraph of a traced one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_tracing.editing import graph_edit
from slapo_tracing.matching import queries
from slapo_tracing.recording.module_hooks import HOOK_TABLES

from ..interfaces.primitive import Primitive
from ..modules.parameters import facts
from ..reporting.errors import ScheduleError

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
    def check(schedule: Schedule, new: Any, subgraph: Any = None, name: str | None = None) -> list[Any]:
        """Refuse what cannot stand in this place; find the matches."""
        if subgraph is None:
            check_module(schedule, new, "replace")
            return []
        if not (isinstance(new, nn.Module) or callable(new)):
            raise ScheduleError(f"{new!r} is neither a module nor a function", path=schedule.path, primitive="replace")
        matches = queries.matches_of(schedule, subgraph, "replace")
        if len(matches) > 1 and isinstance(new, nn.Module) and [*new.parameters(), *new.buffers()]:
            shared = f"{len(matches)} subgraphs would share the weights of one {type(new).__name__}"
            hint = "replace each with its own module, or find them together, by a pattern that returns all their results"
            raise ScheduleError(f"{shared}; {hint}", path=schedule.path, primitive="replace")
        for match in matches:
            graph_edit.check_replace(schedule, match, new)
        return matches

    @staticmethod
    def apply(schedule: Schedule, new: Any, subgraph: Any = None, name: str | None = None) -> None:
        """Swap."""
        if subgraph is None:
            swap(schedule, new)
            return
        for match in schedule.checked:
            graph_edit.replace_subgraph(schedule, match, new, name=name)


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
        if not facts(parameter).names and was.shape == parameter.shape:
            _carry_names(schedule, was, parameter)
            for tag in tags & vars(was).keys() - vars(parameter).keys():
                setattr(parameter, tag, vars(was)[tag])
        if parameter.is_floating_point():
            parameter.requires_grad_(was.requires_grad)


def _carry_names(schedule: Schedule, was: nn.Parameter, parameter: nn.Parameter) -> None:
    """All names; where a tie ends, as the old parameter lives on elsewhere, those of the places it lost."""
    facts(parameter).names = names = facts(was).names
    if schedule.places_of(was):
        held = dict(schedule.root_module.named_parameters(remove_duplicate=False))
        facts(parameter).names = tuple(name for name in names if held.get(name) is parameter)
        facts(was).names = tuple(name for name in names if held.get(name) is not parameter)
