"""Ranks that run a model together: a failure on one rank is raised on all, and ranks may be threads of one process.

Functions take a function that each rank runs, possibly with collectives, and return its result, or raise the same error on
every rank. This sub-package imports only core, and holds ``_torch_private``.
"""
