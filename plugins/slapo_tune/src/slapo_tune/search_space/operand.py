"""Operators of an object that stands for a value."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Operand(ABC):
    """Compares, computes and converts as ``value`` does; what ``value`` raises, every operator raises."""

    @property
    @abstractmethod
    def value(self) -> Any:
        """The value that the object stands for."""

    def __eq__(self, other: object) -> Any:
        return self.value == unwrap(other)

    def __ne__(self, other: object) -> Any:
        return self.value != unwrap(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.value, ndigits)

    @staticmethod
    def _unary(function: Callable[[Any], Any]) -> Callable[[Operand], Any]:
        return lambda self: function(self.value)

    @staticmethod
    def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Operand, Any], Any]:
        return lambda self, other: function(self.value, unwrap(other))

    @staticmethod
    def _reflect(function: Callable[[Any, Any], Any]) -> Callable[[Operand, Any], Any]:
        return lambda self, other: function(unwrap(other), self.value)

    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __add__ = _binary(operator.add)
    __sub__ = _binary(operator.sub)
    __mul__ = _binary(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __pow__ = _binary(operator.pow)
    __radd__ = _reflect(operator.add)
    __rsub__ = _reflect(operator.sub)
    __rmul__ = _reflect(operator.mul)
    __rtruediv__ = _reflect(operator.truediv)
    __rfloordiv__ = _reflect(operator.floordiv)
    __rmod__ = _reflect(operator.mod)
    __rpow__ = _reflect(operator.pow)
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)


def unwrap(value: Any) -> Any:
    """Return the value that an operand stands for, and anything else unchanged."""
    return value.value if isinstance(value, Operand) else value
