"""Optimizers whose update of one element depends on other elements, on ranks that hold shards of parameters.

A numeric probe finds the elements that an update depends on. If shards would change the update, the optimizer steps
stand-ins: whole parameters, each on one owner rank. Gradients and values are gathered to the owner for a step; new values are
scattered. An optimizer of a rank's local parameters, and the ``pieces`` that these are of whole ones, enter. An optimizer of
the same local parameters leaves. It imports ``slapo_core`` and ``slapo_training`` alone.
"""

from . import whole_tensor_checkpoint
from .construction import OptimizerConstruction, adopt_optimizer, lr_scheduler_class, make_on_all_ranks
from .fake_whole_tensors import FakeWholeTensors, SplitTensor, update_dependence
from .named_optimizers import NamedOptimizer, named_optimizers
from .whole_tensor_construction import ParameterLayout
from .whole_tensor_optimizer import WholeTensorOptimizer
from .whole_tensors.whole_tensor import whole_tensors_of

__all__ = [
    "FakeWholeTensors",
    "ParameterLayout",
    "NamedOptimizer",
    "OptimizerConstruction",
    "SplitTensor",
    "WholeTensorOptimizer",
    "adopt_optimizer",
    "make_on_all_ranks",
    "named_optimizers",
    "lr_scheduler_class",
    "update_dependence",
    "whole_tensors_of",
    "whole_tensor_checkpoint",
]
