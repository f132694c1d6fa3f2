"""The classic tuner: a space of symbols, a database of results, and trials of a training script in processes of their own."""

from .database import Database
from .errors import OpenSymbolError, TuneError
from .space import Space
from .symbol import Symbol

__all__ = ["Database", "OpenSymbolError", "Space", "Symbol", "TuneError"]
