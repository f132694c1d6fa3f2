"""Checks of numbers: outputs, gradients and training steps equal those of the unmodified model.

This sub-package may import ``examples``.
"""
