"""Runs of stages on fake tensors, and what they record.

Modules and tensors enter, on any device, real, fake or meta; ``records`` leave. Private names of torch are in
``_torch_private.py``.
"""

from .operator_recorder import OperatorRecorder

__all__ = ["OperatorRecorder"]
