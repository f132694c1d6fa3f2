"""Errors of the tuner."""

from __future__ import annotations

from slapo_core import SlapoError


class TuneError(SlapoError):
    """A space, database, configuration file or command line that cannot be used as it is."""


class OpenSymbolError(TuneError):
    """The value of a symbol was asked for before the symbol was fixed; ``name`` is the symbol's."""

    def __init__(self, message: str, *, name: str) -> None:
        self.name = name
        super().__init__(message)
