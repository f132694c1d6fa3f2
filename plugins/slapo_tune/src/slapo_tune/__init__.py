"""The classic tuner: a space of symbols, a database of results, and trials of a training script in processes of their own."""

from .database import Database
from .search_space.errors import OpenSymbolError, TuneError
from .search_space.space import Space
from .search_space.symbol import Symbol

__all__ = ["Database", "OpenSymbolError", "Space", "Symbol", "TuneError"]
