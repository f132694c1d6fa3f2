"""Ranks that run a model together: a failure on one rank is raised on all, and ranks may be threads of one process.
In: a function that each rank runs, possibly with collectives. Out: its result, or the same error on every rank.
Lowest room: imports core only; it holds ``_torch_private``.
"""
