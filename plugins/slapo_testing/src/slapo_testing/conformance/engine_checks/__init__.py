"""Checks of a dialect: training, evaluation, checkpoints and refusals of its engines.

May import ``examples``.
"""
