"""Optimizers whose update of one element depends on others, where ranks hold parts of a parameter.

The probe finds out, by trying, what an optimizer's update depends on. Where parts would change it, the optimizer steps
stand-ins: whole parameters, each on its owner among the ranks that hold parts of it. Gradients and values are gathered to the
owner for a step, and the new values go back. What enters is an optimizer of a rank's local parameters and where these lie in
the whole ones (``pieces``); what leaves is an optimizer of the same local parameters. It imports ``slapo_core`` and
``slapo_training`` alone.
"""

from . import whole_tensor_checkpoint
from .construction import OptimizerConstruction, make_on_all_ranks
from .named_optimizers import NamedOptimizer, named_optimizers
from .rank_optimizer import adopt_optimizer, lr_scheduler_class
from .whole_tensor_construction import ParameterLayout
from .whole_tensor_optimizer import WholeTensorOptimizer

__all__ = [
    "ParameterLayout",
    "NamedOptimizer",
    "OptimizerConstruction",
    "WholeTensorOptimizer",
    "adopt_optimizer",
    "make_on_all_ranks",
    "named_optimizers",
    "lr_scheduler_class",
    "whole_tensor_checkpoint",
]
