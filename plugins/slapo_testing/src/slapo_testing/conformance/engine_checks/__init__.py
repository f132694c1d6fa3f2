"""Checks of a dialect: training, evaluation, checkpoints and refusals of its engines.

This sub-package may import ``examples``.
"""
