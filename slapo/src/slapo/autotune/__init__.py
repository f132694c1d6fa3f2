"""The classic tuner: the space, its symbols, the database of results, and ``python -m slapo.autotune.tune``."""

from slapo_tune import Database, Space, Symbol

__all__ = ["Database", "Space", "Symbol"]
