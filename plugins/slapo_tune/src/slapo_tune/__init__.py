"""The classic tuner: a space of symbols, a database of results, and trials of a training script in processes of their own.

The tuner runs a user's script and knows neither models nor schedules. ``Traversal`` is the loop over a
space: each level calls ``update_space`` on a copy that holds only the symbols fixed so far. If the function compares an
open symbol, the symbols created until then are fixed first. The whole space is traversed once before the first trial,
so an error in it costs no training. A trial is a session of its own, whose processes carry a mark in their environment,
because torchrun's workers start sessions that no process group reaches. ``database`` reads, merges and replaces its
file under a lock for every result; tuners share nothing else.
"""

from .database import Database
from .search_space.space import Space
from .search_space.symbol import OpenSymbolError, Symbol, TuneError

__all__ = ["Database", "OpenSymbolError", "Space", "Symbol", "TuneError"]
