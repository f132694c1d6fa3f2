"""The configurations tried so far, as a tree, so that none is tried twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..search_space.symbol import TuneError
from .schedule_file import SpaceFunction
from .schedule_space import ScheduleSpace, SymbolDefinition, value_key

Choose = Callable[[SymbolDefinition, Any, Sequence[Any]], Any]
"""Takes a symbol, its default and the values that still lead to an untried configuration; returns one of these."""

Path = Sequence[tuple[SymbolDefinition, Any]]


class ExhaustedError(TuneError):
    """All configurations of the space have been tried."""


@dataclass
class _Node:
    """The next symbol after some values, and the subtree of each of its values.

    Args:
        symbol: None before it is known, and in a leaf.
        tried: Whether a configuration ends here, or all below have been tried.
    """

    symbol: SymbolDefinition | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    tried: bool = False

    @property
    def is_exhausted(self) -> bool:
        if not self.tried and self.symbol is not None and len(self.children) == len(self.symbol.candidates):
            self.tried = all(each.is_exhausted for each in self.children.values())
        return self.tried

    def step(self, symbol: SymbolDefinition, value: Any) -> _Node:
        if self.symbol is None:
            self.symbol = symbol
        if self.symbol != symbol:
            old, new = self.symbol, symbol
            what = f"asks for {new.name!r} where" if old.name != new.name else f"has {new.shown()} for {new.name!r}, and"
            then = f"{old.name!r}" if old.name != new.name else old.shown()
            raise TuneError(
                f"the space {what} earlier trials had {then}: the database is of another space; use another database or name"
            )
        return self.children.setdefault(value_key(value), _Node())


class Exploration:
    """Tree of the configurations tried: below each value of a symbol the symbol that comes next.

    Args:
        paths: The configurations tried, each as its symbols and values in the order of declaration.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._root = _Node()
        for path in paths:
            self.add(path)

    def add(self, path: Path) -> None:
        """Mark a configuration as tried.

        Raises:
            TuneError: after the same values another symbol was declared: the configuration is one of another space.
        """
        node = self._root
        for symbol, value in path:
            node = node.step(symbol, value)
        node.tried = True

    @property
    def is_exhausted(self) -> bool:
        """True if no untried configuration is left."""
        return self._root.is_exhausted

    def untried_space(self, choose: Choose) -> UntriedSpace:
        """Return a space whose values, chosen by ``choose``, make a configuration that was not tried."""
        if self.is_exhausted:
            raise ExhaustedError("all configurations of the space have been tried; give it more candidates")
        return UntriedSpace(self._root, choose)


class UntriedSpace(ScheduleSpace):
    """A space that takes values which lead to an untried configuration.

    Attributes:
        path: The symbols and values so far.
    """

    def __init__(self, root: _Node, choose: Choose) -> None:
        super().__init__()
        self.path: list[tuple[SymbolDefinition, Any]] = []
        self._node, self._choose = root, choose

    def _decide(self, symbol: SymbolDefinition, default: Any) -> Any:
        left = [value for value in symbol.candidates if not self._node.step(symbol, value).is_exhausted]
        value = self._choose(symbol, default, left)
        if value_key(value) not in map(value_key, left):
            raise TuneError(
                f"symbol {symbol.name!r}: the sampler chose {value!r}, which is not one of {left}; use another sampler"
            )
        self._node = self._node.step(symbol, value)
        self.path.append((symbol, value))
        return value


class ReplayedSpace(ScheduleSpace):
    """A space with the values of an earlier trial, each of which must be there."""

    def _decide(self, symbol: SymbolDefinition, default: Any) -> Any:
        if symbol.name not in self._given or symbol.index(self._given[symbol.name]) < 0:
            known = f"{self._given[symbol.name]!r}" if symbol.name in self._given else "no value"
            raise TuneError(
                f"the database is of another space: symbol {symbol.name!r} has {symbol.shown()}, and {known} in an earlier "
                "trial; use another database or name"
            )
        return super()._decide(symbol, default)


def enumerate_space(function: SpaceFunction, limit: int) -> list[Path] | None:
    """Return all configurations of a space, in the order of nested loops; None if there are more than ``limit``."""
    found: list[Path] = []
    tree = Exploration()
    while not tree.is_exhausted:
        space = tree.untried_space(lambda symbol, default, left: left[0])
        function(space)
        if not space.path or len(found) == limit:
            return None if space.path else []
        tree.add(space.path)
        found.append(space.path)
    return found
