"""Interface of a primitive: one verb of the schedule language."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class Primitive(ABC):
    """One way to change how a module runs.

    Subclasses are never instantiated. ``check`` and ``apply`` are static methods that take the schedule and the user's
    arguments. ``help(sch.<name>)`` shows the class docstring.

    Attributes:
        name: The word users type: ``sch.<name>(...)``. The classic static method ``name()`` is accepted too.
        requires: Primitives that must have been applied to this module before.
        conflicts: Primitives that must not have been applied to this module, to one that contains it, or to one inside it.
        scope: The modules that ``apply`` changes directly, which a rollback restores: ``"subtree"``, this module with all
            inside it, or ``"module"``, this module alone. ``"module"`` is much cheaper on a large model. Change anything else
            through ``Schedule.replace_module``, ``set_parameter`` and ``touch``.
        over_group: True if the step communicates over the schedule's group when the model runs, as ``sync`` does.

    Example:
        >>> @register_primitive()
        ... class FreezePrimitive(Primitive):
        ...     "Freeze the parameters of a module."
        ...
        ...     name = "freeze"
        ...
        ...     @staticmethod
        ...     def check(schedule):
        ...         found = list(schedule.mod.parameters())
        ...         if not found:
        ...             raise ScheduleError("has no parameters", path=schedule.path, primitive="freeze")
        ...         return found
        ...
        ...     @staticmethod
        ...     def apply(schedule, *, checked):
        ...         for parameter in checked:
        ...             parameter.requires_grad_(False)
        >>> sch = create_schedule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> sch["0"].freeze().mod.weight.requires_grad
        False
        >>> sch["1"].freeze()
        Traceback (most recent call last):
        slapo_core.reporting.errors.ScheduleError: freeze('1'): has no parameters
    """

    name: ClassVar[Any] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    scope: ClassVar[Literal["module", "subtree"]] = "subtree"
    over_group: ClassVar[bool] = False

    @staticmethod
    def check(schedule: Schedule, /, *args: Any, **kwargs: Any) -> Any:
        """Raise ``ScheduleError`` if the step is illegal. Must change nothing.

        Returns:
            A value for ``apply``, such as the planned step. ``apply`` receives it as the keyword-only argument ``checked`` if
            it has that parameter and ``check`` does not.
        """

    @staticmethod
    @abstractmethod
    def apply(schedule: Schedule, /, *args: Any, **kwargs: Any) -> Any:
        """Change the module.

        Returns:
            None to return the schedule to the user, so that calls chain; any other value is returned as it is.
        """

    @staticmethod
    def init_metadata() -> Any:
        """Return the initial value of ``schedule.metadata.primitives[name]``; called once per module."""
        return None


@lru_cache(maxsize=1024)
def takes_checked(primitive: type[Primitive]) -> bool:
    """Return True if ``apply`` receives the result of ``check``: ``checked`` is keyword-only, and no parameter of ``check``."""
    checked = inspect.signature(primitive.apply).parameters.get("checked")
    is_keyword_only = checked is not None and checked.kind is checked.KEYWORD_ONLY
    return is_keyword_only and "checked" not in inspect.signature(primitive.check).parameters


@lru_cache(maxsize=1024)
def call_signature(primitive: type[Primitive]) -> inspect.Signature:
    """Return the signature that users see: that of ``apply``, without ``checked``.

    Its first parameter is the schedule.

    Example:
        >>> str(call_signature(Registry().primitive("replace")))
        "(schedule: 'Schedule', new: 'Any', subgraph: 'Any' = None, name: 'str | None' = None) -> 'None'"
    """
    signature = inspect.signature(primitive.apply)
    shown = [each for name, each in signature.parameters.items() if name != "checked" or not takes_checked(primitive)]
    return signature.replace(parameters=shown)
