"""The interface of a primitive: one word of the schedule language."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule

_CHECKED = "checked"


class Primitive(ABC):
    """One way to change how a module runs.

    Subclasses are never instantiated; ``check`` and ``apply`` are static methods whose first argument is the
    schedule the user called, the others the user's own. The docstring is what ``help(sch.<name>)`` shows.

    Attributes:
        name: The word users type: ``sch.<name>(...)``. The classic static method ``name()`` is accepted too.
        requires: Primitives that must have been applied to this module before.
        conflicts: Primitives that must not have been applied to this module, one that contains it or one inside it.
        scope: What ``apply`` changes directly, and so what is remembered to undo it: ``"subtree"``, this module with all
            inside it, or ``"module"``, this module alone, which is much cheaper on a large one. Anything else it changes
            through ``Schedule.replace_module``, ``set_parameter`` and ``touch``.
        over_group: True where the step communicates over the schedule's group when the model runs, as ``sync`` does.
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
            Anything that ``apply`` needs, such as the planned step: ``apply`` receives it as the keyword-only argument
            ``checked`` if it has that parameter and ``check`` does not.
        """

    @staticmethod
    @abstractmethod
    def apply(schedule: Schedule, /, *args: Any, **kwargs: Any) -> Any:
        """Change the module. ``None`` lets calls chain; any other value is what the user's call returns."""

    @staticmethod
    def init_metadata() -> Any:
        """The value ``schedule.metadata.primitives[name]`` starts with, once per module."""
        return None


def takes_checked(primitive: type[Primitive]) -> bool:
    """Return whether ``apply`` receives the result of ``check``: as ``checked``, keyword-only and no argument of ``check``."""
    checked = inspect.signature(primitive.apply).parameters.get(_CHECKED)
    is_reserved = checked is not None and checked.kind is checked.KEYWORD_ONLY
    return is_reserved and _CHECKED not in inspect.signature(primitive.check).parameters


def call_signature(primitive: type[Primitive]) -> inspect.Signature:
    """Return the signature of ``apply`` without ``checked``, which the user does not give."""
    signature = inspect.signature(primitive.apply)
    if not takes_checked(primitive):
        return signature
    return signature.replace(parameters=[each for name, each in signature.parameters.items() if name != _CHECKED])
