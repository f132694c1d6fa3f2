"""Comparison of two models: outputs, and the gradient of each parameter under its original name.

This sub-package may import ``model_setup`` and ``ranks``; the testing kit builds on it.
"""

from .equivalence import Run, Tolerance, assert_equivalent, differences, run_model, weighted_sum
from .staged_model import StagedModel, as_built
from .tensor_leaves import dense

__all__ = [
    "Run",
    "StagedModel",
    "Tolerance",
    "as_built",
    "assert_equivalent",
    "dense",
    "differences",
    "run_model",
    "weighted_sum",
]
