"""Checks that an engine makes once, before its first optimizer step that cuts a batch.

What enters: the program, the options common to all engines, and the first step's micro-batches of each rank. What leaves: a
``BuildError`` for a loss that is no mean over rows, a warning that names modules that mix rows, and whether the model injects
gradients, which decides how an engine scales its backwards. Model, random numbers and gradients are left as they were. It may
import what ``slapo_core`` and the modules of ``slapo_training`` beside it offer; it knows no engine.
"""

from __future__ import annotations

from .checks import FirstStep
from .injected_gradients import GradientScale, scaled_gradient

__all__ = ["FirstStep", "GradientScale", "scaled_gradient"]
