"""Modes that record what runs under them: operators, collectives, and the memory of storages.

Tensors enter, on any device, real, fake or meta; ``records`` and the passes of ``segments`` leave. It may import ``records``.
Private names of torch are in ``_torch_private.py``.
"""

from .operator_recorder import OperatorRecorder

__all__ = ["OperatorRecorder"]
