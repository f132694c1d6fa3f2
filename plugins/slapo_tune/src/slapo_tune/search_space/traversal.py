"""Every configuration of a space, depth first: the last symbol changes fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import OpenSymbolError, TuneError

if TYPE_CHECKING:
    from .space import Space

UpdateSpace = Callable[[Mapping[str, Any], "Space"], "Space | None"]
"""The ``update_space(args, space)`` of a configuration file; it may return None for the space that it was given."""

MAX_SYMBOLS = 100
"""More in one configuration are taken for a mistake: symbols whose names are other ones in each call."""


class Traversal:
    """Iterates over the configurations of a space, as dicts of names to values, in the order of nested loops.

    ``update_space`` is called before each symbol is chosen, on a copy that has the fixed symbols and those of ``space`` alone.
    Where it asks for the value of an open symbol, it ends there: the symbols that it made until then are fixed first, and it is
    called again.

    Args:
        space: Where to start; it is left as it is.
    """

    def __init__(self, space: Space, args: Mapping[str, Any], update: UpdateSpace) -> None:
        self._space, self._args, self._update = space, args, update
        self._skipping = False

    def skip_rest(self) -> None:
        """Leave out the values of the innermost symbol behind that of the configuration that was yielded last."""
        self._skipping = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._skipping = False
        yield from self._configurations(self._space.clone())

    def _configurations(self, base: Space) -> Iterator[dict[str, Any]]:
        space = self._update_space(base)
        if len(space.fixed_values()) > MAX_SYMBOLS:
            raise TuneError(f"update_space: it has made {MAX_SYMBOLS} symbols and makes more; make the same in every call")
        if (symbol := space.next()) is None:
            yield space.to_dict()
            return
        if not symbol.vals:
            where = space.cfg_dict_to_str(space.fixed_values())
            raise TuneError(f"symbol({symbol.name!r}): it has no candidates where {where} is fixed; give it at least one")
        for index in range(len(symbol.vals)):
            yield from self._configurations(base.clone_with(symbol, index))
            if self._skipping:
                self._skipping = False
                return

    def _update_space(self, base: Space) -> Space:
        space = base.clone()
        try:
            returned = self._update(self._args, space)
        except OpenSymbolError:
            if space.next() is None:
                raise
            return space
        if returned is not None and not isinstance(returned, type(space)):
            raise TuneError(f"update_space: it returned {returned!r}; return the space that it was given, or nothing")
        space = space if returned is None else returned
        if opened := [name for name in base.fixed_values() if name not in space.fixed_values()]:
            raise TuneError(
                f"update_space: {opened[0]!r} was fixed and is not in the space it leaves; return the one that it was given"
            )
        return space
