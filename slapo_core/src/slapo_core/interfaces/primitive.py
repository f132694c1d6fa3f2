"""The interface of a primitive: one word of the schedule language."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


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

        What it returns, the step worked out say, ``apply`` finds as ``schedule.checked``.
        """

    @staticmethod
    @abstractmethod
    def apply(schedule: Schedule, /, *args: Any, **kwargs: Any) -> Any:
        """Change the module. ``None`` lets calls chain; any other value is what the user's call returns."""

    @staticmethod
    def init_metadata() -> Any:
        """The value ``schedule.metadata.primitives[name]`` starts with, once per module."""
        return None
