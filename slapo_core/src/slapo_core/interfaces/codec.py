"""The interface of a codec: how arguments of one type are written in saved schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class Codec(ABC):
    """The form of one type of argument in a saved schedule: ``{name: parts}`` as data, an expression as Python.

    Attributes:
        name: Key of the data; starts with ``"$"``, e.g. ``"$match"``.
        module: Module that the Python expression needs imported.
        optional: Keys of ``parts`` that may be missing. The value of such a key must be importable: it is left out where it is
            not, and read as None where its module is not trusted.
    """

    name: ClassVar[str]
    module: ClassVar[str] = ""
    optional: ClassVar[frozenset[str]] = frozenset()

    @staticmethod
    @abstractmethod
    def fits(value: Any) -> bool:
        """Return whether the codec writes this value."""

    @staticmethod
    @abstractmethod
    def parts(value: Any) -> dict[str, Any]:
        """Return the parts of a value: plain data, or values that other codecs write."""

    @staticmethod
    @abstractmethod
    def build(parts: dict[str, Any], schedule: Schedule) -> Any:
        """Return the value that consists of these parts, for the schedule that takes the step.

        Raises:
            ScheduleError: the schedule's model has no such value.
        """

    @staticmethod
    @abstractmethod
    def source(parts: str) -> str:
        """Return a Python expression for the value, given one for its parts; ``sch`` is the top schedule."""
