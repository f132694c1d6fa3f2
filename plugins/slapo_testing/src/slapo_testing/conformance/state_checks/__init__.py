"""Checks of state: what a step must leave unchanged, undo, and reproduce from the journal.

This sub-package may import ``examples``.
"""
