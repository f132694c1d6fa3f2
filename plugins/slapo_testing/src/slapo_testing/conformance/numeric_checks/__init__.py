"""Checks of numbers: outputs, gradients and training steps equal those of the unmodified model.

May import ``examples``.
"""
