"""A tunable value with its candidates, and the errors of the tuner."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from slapo_core import SlapoError


class TuneError(SlapoError):
    """A space, database, configuration file or command line that cannot be used as it is."""


class OpenSymbolError(TuneError):
    """The value of a symbol was asked for before the symbol was fixed; ``name`` is the symbol's."""

    def __init__(self, message: str, *, name: str) -> None:
        self.name = name
        super().__init__(message)


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


class Symbol(Operand):
    """A tunable symbol.

    A symbol is open until :meth:`fix_at` chooses one of its candidates. From then on it compares, computes and prints as that
    value does. Comparing or computing with an open symbol raises :class:`OpenSymbolError`.

    Args:
        name: Name of the symbol, e.g. ``"batch_size"``.
        vals: Candidate values, e.g. ``range(8, 65, 8)``; equal values are kept once. They should be listed from the least
            demanding on, as ``--error-stop symbol`` skips the values behind one that failed.

    Raises:
        TuneError: the name is not a text, or ``vals`` is a single value.
    """

    def __init__(self, name: str, vals: Iterable[Any]) -> None:
        if not isinstance(name, str) or not name:
            raise TuneError(f"symbol({name!r}): a name is a text of at least one letter, not {name!r}; use e.g. 'batch_size'")
        if isinstance(vals, (str, bytes)) or not isinstance(vals, Iterable):
            raise TuneError(f"symbol({name!r}): the candidates are {vals!r}, one value; give a list, [{vals!r}]")
        self.name = name
        self.vals: list[Any] = []
        self._index: int | None = None
        for val in vals:
            self.add(val)

    @property
    def value(self) -> Any:
        """The value that the symbol is fixed at.

        Raises:
            OpenSymbolError: the symbol is open.
        """
        if self._index is None:
            raise OpenSymbolError(
                f"symbol({self.name!r}): it is open, with the candidates {self.vals}, so it has no value to compare or compute "
                "with; fix it first, with fix_at(idx)",
                name=self.name,
            )
        return self.vals[self._index]

    def add(self, val: Any) -> None:
        """Add a value to the symbol. If the value is already in the symbol, do nothing."""
        val = unwrap(val)
        if val not in self.vals:
            self.vals.append(val)

    def fix_at(self, idx: int) -> None:
        """Fix the value of this symbol at the given index.

        Args:
            idx: Index in ``vals``, from 0.

        Raises:
            TuneError: there is no such index; the symbol stays as it was.
        """
        try:
            index = operator.index(idx)
        except TypeError as err:
            raise TuneError(
                f"fix_at({self.name!r}): {idx!r} is not an index; give a number from 0 to {len(self.vals) - 1}"
            ) from err
        if not self.vals:
            raise TuneError(f"fix_at({self.name!r}): the symbol has no candidates; add one first, with add(val)")
        if not 0 <= index < len(self.vals):
            raise TuneError(
                f"fix_at({self.name!r}): no index {index} in the candidates {self.vals}; give one from 0 to "
                f"{len(self.vals) - 1}"
            )
        self._index = index

    def is_fixed(self) -> bool:
        """Check if the value of this symbol has been fixed."""
        return self._index is not None

    def open(self) -> None:
        self._index = None

    def clone(self) -> Symbol:
        """Return a copy that is fixed, and gets further candidates, independently of this one."""
        copied = Symbol(self.name, ())
        copied.vals = [*self.vals]
        copied._index = self._index
        return copied

    def __repr__(self) -> str:
        shown = f"{self.vals}" if self._index is None else f"{self.vals}, fixed at {self.vals[self._index]!r}"
        return f"Symbol({self.name!r}, {shown})"

    def __str__(self) -> str:
        return repr(self) if self._index is None else str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)
