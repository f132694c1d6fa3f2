"""Exponential moving averages of the weights that an engine trains.

Each rank averages the values that its own optimizer steps, in parts as they lie, so that a step sends nothing. What enters is
an engine; what leaves is a ``WeightAverage``, which evaluates, exports and gathers. It imports ``slapo_core`` and
``slapo_training``.
"""

from .average_list import AverageList, Taken
from .averaged_engine import AveragedEngine
from .master_values import MasterValue, buffer_values, master_values
from .weight_average import WeightAverage, ema

__all__ = ["AverageList", "AveragedEngine", "MasterValue", "Taken", "WeightAverage", "buffer_values", "ema", "master_values"]
