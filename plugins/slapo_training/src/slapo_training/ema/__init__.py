"""Exponential moving averages of the weights that an engine trains.

Each rank averages the values that its own optimizer steps, so that a step sends no message. An engine enters; a
``WeightAverage`` leaves, which evaluates, exports and gathers. It imports ``slapo_core`` and ``slapo_training``.
"""

from .averaged_engine import AveragedEngine, ema
from .master_values import MasterValue, buffer_values, master_values
from .weight_average import AverageList, Averages, WeightAverage

__all__ = ["AverageList", "AveragedEngine", "MasterValue", "Averages", "WeightAverage", "buffer_values", "ema", "master_values"]
