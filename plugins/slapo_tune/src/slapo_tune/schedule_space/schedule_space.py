"""The symbols of a schedule, each with its value in this run."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slapo_core import UnknownNameError

from ..search_space.symbol import TuneError

MAX_CANDIDATES = 10_000
"""Most candidates of one symbol."""

_PLAIN = (type(None), bool, builtins.int, float, str)


@dataclass(frozen=True)
class SymbolDefinition:
    """Name and candidates of a symbol.

    Args:
        kind: ``"int"`` for numbers of a range, in order; ``"choice"`` for others.
        candidates: The values it may have.
    """

    name: str
    kind: str
    candidates: tuple[Any, ...]

    def index(self, value: Any) -> builtins.int:
        """Return the place of a value among the candidates, or -1. ``True`` and ``1`` are different values."""
        return self._places.get(value_key(value), -1)

    @cached_property
    def _places(self) -> dict[str, builtins.int]:
        return {value_key(candidate): place for place, candidate in enumerate(self.candidates)}

    def shown(self) -> str:
        """Return the candidates as text: ``0 to 32`` or ``1, 2, 4``."""
        if self.kind == "int" and len(self.candidates) > 4:
            step = self.candidates[1] - self.candidates[0]
            by = f" by {step}" if step > 1 else ""
            return f"{self.candidates[0]} to {self.candidates[-1]}{by}"
        return ", ".join(map(repr, self.candidates))


def value_key(value: Any) -> str:
    """Return a text that is equal for equal values of the same type."""
    return json.dumps(value)


def configuration_key(values: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal configurations, whatever the order of their symbols."""
    return json.dumps(dict(sorted(values.items())))


class ScheduleSpace(Mapping[str, Any]):
    """The symbols of a schedule, each with its value: that of the run, or the default.

    A schedule file uses one in ``space(space)``, which declares symbols, and in ``schedule(sch, space)``, which reads them and
    may declare more. Each call returns the value at once, so later symbols may depend on it. As a mapping it holds the symbols
    declared so far.

    Args:
        values: Values of this run by name.

    Example:
        >>> space = ScheduleSpace({"checkpointed": 3})
        >>> space.int("checkpointed", 0, 12), space.choice("kernel", ["flash", "eager"])
        (3, 'flash')
        >>> dict(space)
        {'checkpointed': 3, 'kernel': 'flash'}
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._given = dict(values or {})
        self._values: dict[str, Any] = {}
        self.definitions: dict[str, SymbolDefinition] = {}

    def int(
        self,
        name: str,
        low: builtins.int,
        high: builtins.int,
        step: builtins.int = 1,
        default: builtins.int | None = None,
    ) -> builtins.int:
        """Declare a symbol of whole numbers and return its value.

        Args:
            name: Name of the symbol.
            low: Smallest value.
            high: Largest value, included where ``step`` reaches it.
            step: Distance of two values.
            default: Value of a run without a tuner; default: ``low``.

        Raises:
            TuneError: the numbers make no range, or the run's value is not in it.
        """
        if any(type(number) is not builtins.int for number in (low, high, step)) or step < 1 or high < low:
            raise TuneError(
                f"space.int({name!r}): {low!r} to {high!r} by {step!r} is no range of whole numbers; give low <= high and step"
            )
        value: builtins.int = self._declare(SymbolDefinition(name, "int", tuple(range(low, high + 1, step))), default)
        return value

    def choice(self, name: str, candidates: Iterable[Any], default: Any = None) -> Any:
        """Declare a symbol with listed candidates and return its value.

        Args:
            name: Name of the symbol.
            candidates: Numbers, texts, truth values or None; repeated ones count once.
            default: Value of a run without a tuner; default: the first candidate.

        Raises:
            TuneError: there is no candidate, one is of another type, or the run's value is not among them.
        """
        if isinstance(candidates, (str, bytes)) or not isinstance(candidates, Iterable):
            raise TuneError(f"space.choice({name!r}): the candidates are {candidates!r}, one value; give a list")
        listed = list(candidates)
        if wrong := [value for value in listed if type(value) not in _PLAIN or value != value]:
            raise TuneError(f"space.choice({name!r}): {wrong[0]!r} cannot be stored; use numbers, texts, truth values or None")
        return self._declare(
            SymbolDefinition(name, "choice", tuple({value_key(each): each for each in listed}.values())), default
        )

    def _declare(self, symbol: SymbolDefinition, default: Any) -> Any:
        known = self.definitions.get(symbol.name)
        if known is not None:
            if known != symbol:
                raise TuneError(
                    f"symbol {symbol.name!r}: declared twice, with {known.shown()} and {symbol.shown()}; rename one"
                )
            return self._values[symbol.name]
        if not isinstance(symbol.name, str) or not symbol.name.isidentifier():
            raise TuneError(f"symbol {symbol.name!r}: that is no name; use letters, digits and underscores")
        if not 1 <= len(symbol.candidates) <= MAX_CANDIDATES:
            raise TuneError(
                f"symbol {symbol.name!r}: it has {len(symbol.candidates)} candidates; give 1 to {MAX_CANDIDATES}, by a step"
            )
        if default is not None and symbol.index(default) < 0:
            raise TuneError(f"symbol {symbol.name!r}: the default {default!r} is not a candidate; it has {symbol.shown()}")
        value = self._decide(symbol, symbol.candidates[0] if default is None else default)
        self.definitions[symbol.name], self._values[symbol.name] = symbol, value
        return value

    def _decide(self, symbol: SymbolDefinition, default: Any) -> Any:
        """Return the value of a symbol that is declared for the first time."""
        if symbol.name not in self._given:
            return default
        if (index := symbol.index(self._given[symbol.name])) < 0:
            raise TuneError(f"symbol {symbol.name!r}: {self._given[symbol.name]!r} is not a candidate; it has {symbol.shown()}")
        return symbol.candidates[index]

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise UnknownNameError.of("symbol", name, self._values)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a symbol, or a default if it was not declared."""
        return self._values.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> builtins.int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values})"
