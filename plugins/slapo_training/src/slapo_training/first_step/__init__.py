"""Checks that an engine makes once, before its first optimizer step that splits a batch.

The program, the common options, and the first step's micro-batches of each rank enter. A ``BuildError`` for a loss that is no
mean over rows leaves, or a warning that names modules that mix rows, and whether the model injects gradients, which decides the
scale of backwards. Model, random state and gradients do not change. It may import ``slapo_core``, ``slapo_tracing`` and the
rooms of ``slapo_training`` beside it; it knows no engine.
"""

from .checks import FirstStep
from .injected_check import scaled_gradient

__all__ = ["FirstStep", "scaled_gradient"]
