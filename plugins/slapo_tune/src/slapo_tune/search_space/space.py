"""The tuning space: symbols in the order in which they are fixed, and the traversal of all configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from slapo_core import UnknownNameError

from .symbol import OpenSymbolError, Symbol, TuneError

UpdateSpace = Callable[[Mapping[str, Any], "Space"], "Space | None"]
"""The ``update_space(args, space)`` of a configuration file; it may return None for the space that it was given."""

MAX_SYMBOLS = 100
"""More in one configuration are taken for a mistake: symbols whose names are other ones in each call."""


class Space:
    """The tuning space.

    A tuner takes the first open symbol (:meth:`next`), fixes it, and calls ``update_space`` of the user's configuration again.
    So the candidates of later symbols may depend on the values of earlier ones.
    """

    def __init__(self) -> None:
        self._symbols: dict[str, Symbol] = {}

    def create_symbol(self, name: str, vals: Iterable[Any]) -> Symbol:
        """Create a symbol in the space, and return it. If the symbol already exists:

        1. If the symbol is fixed, do nothing;

        2. Otherwise re-create the symbol, because its candidate values may change due to other fixed symbols. It keeps its
           place among the symbols, and its holders see the new candidates.

        Args:
            name: Name of the symbol.
            vals: Candidate values, the least demanding first.
        """
        known = self._symbols.get(name)
        if known is not None and known.is_fixed():
            return known
        created = Symbol(name, vals)
        known = self._symbols.setdefault(name, created)
        known.vals = created.vals
        return known

    def next(self) -> Symbol | None:
        """Get the next symbol to fix: the first open one in order of creation, or None when all are fixed."""
        return next((symbol for symbol in self._symbols.values() if not symbol.is_fixed()), None)

    def reset(self) -> None:
        """Reset the space to the initial state: every symbol is open again."""
        for symbol in self._symbols.values():
            symbol.open()

    def to_dict(self) -> dict[str, Any]:
        """Convert the space to a dict of names to values. Note that all symbols must be fixed before calling this function.

        Raises:
            OpenSymbolError: a symbol is open; the message names it.
        """
        if (symbol := self.next()) is not None:
            raise OpenSymbolError(
                f"to_dict({symbol.name!r}): the symbol is open, with the candidates {symbol.vals}; fix it first, "
                "with fix_at(idx)",
                name=symbol.name,
            )
        return self.fixed_values()

    def fixed_values(self) -> dict[str, Any]:
        """Return the values of the symbols that are fixed."""
        return {name: symbol.value for name, symbol in self._symbols.items() if symbol.is_fixed()}

    def clone(self) -> Space:
        """Clone the space: fixing a symbol of the copy changes nothing here."""
        copied = Space()
        copied._symbols = {name: symbol.clone() for name, symbol in self._symbols.items()}
        return copied

    def clone_with(self, symbol: Symbol, idx: int) -> Space:
        """Return a copy of the space in which a symbol, known to it or not, is fixed at an index of its candidates."""
        copied, fixed = self.clone(), symbol.clone()
        fixed.fix_at(idx)
        copied._symbols[symbol.name] = fixed
        return copied

    @staticmethod
    def cfg_dict_to_str(cfg_dict: Mapping[str, Any]) -> str:
        """Convert a config dict to a string for logging and debugging, e.g. ``"(batch_size: 8, ckpt_ratio: 0.5)"``."""
        return f"({', '.join(f'{name}: {value}' for name, value in cfg_dict.items())})"

    def log_space(
        self, training_script_args: Mapping[str, Any], update_space_fn: Callable[[Mapping[str, Any], Space], Space | None]
    ) -> None:
        """Print the tuning space for logging: every configuration, and how many there are. The space stays as it is.

        Args:
            training_script_args: Arguments of the training script, as ``update_space_fn`` takes them.
            update_space_fn: The ``update_space(args, space)`` of a configuration file.
        """
        found = [*Traversal(self, training_script_args, update_space_fn)]
        print(*map(self.cfg_dict_to_str, found), f"space size: {len(found)}", sep="\n")

    def __contains__(self, name: str) -> bool:
        return name in self._symbols

    def __getitem__(self, name: str) -> Symbol:
        if name not in self._symbols:
            raise UnknownNameError.of("symbol", name, self._symbols)
        return self._symbols[name]

    def __repr__(self) -> str:
        return f"Space({list(self._symbols.values())})"


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
