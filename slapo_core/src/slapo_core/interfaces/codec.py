"""Interface of a codec, which writes arguments of one type into saved schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class Codec(ABC):
    """Representation of one argument type in a saved schedule: ``{name: parts}`` in JSON, an expression in Python.

    Attributes:
        name: Key in JSON. It starts with ``"$"``, e.g. ``"$match"``.
        module: Module that the Python expression needs imported.
        optional: Keys of ``parts`` that may be missing. The value of such a key is a function. It is written only if it can be
            imported, and read as None if its module is not trusted.

    Example:
        >>> class FractionCodec(Codec):
        ...     name, module = "$fraction", "fractions"
        ...
        ...     @staticmethod
        ...     def fits(value):
        ...         return isinstance(value, Fraction)
        ...
        ...     @staticmethod
        ...     def parts(value):
        ...         return {"of": [value.numerator, value.denominator]}
        ...
        ...     @staticmethod
        ...     def build(parts, schedule):
        ...         return Fraction(*parts["of"])
        ...
        ...     @staticmethod
        ...     def source(parts):
        ...         return f"fractions.Fraction(*{parts}['of'])"
        >>> from fractions import Fraction
        >>> FractionCodec.build(FractionCodec.parts(Fraction(2, 4)), None)
        Fraction(1, 2)
    """

    name: ClassVar[str]
    module: ClassVar[str] = ""
    optional: ClassVar[frozenset[str]] = frozenset()

    @staticmethod
    @abstractmethod
    def fits(value: Any) -> bool:
        """Return True if this codec writes the value."""

    @staticmethod
    @abstractmethod
    def parts(value: Any) -> dict[str, Any]:
        """Return the parts of a value: plain data, or values that other codecs write."""

    @staticmethod
    @abstractmethod
    def build(parts: dict[str, Any], schedule: Schedule) -> Any:
        """Return the value with these parts.

        Args:
            parts: What ``parts`` returned, read from the file.
            schedule: The top schedule of the model that the step is applied to.

        Raises:
            ScheduleError: the schedule's model has no such value.
        """

    @staticmethod
    @abstractmethod
    def source(parts: str) -> str:
        """Return a Python expression for the value.

        Args:
            parts: A Python expression for the parts. The variable ``sch`` is the top schedule.
        """
