"""The tracers ``"value"``, ``"fx"`` and ``"export"``, and the choice between them.

A tracer takes a module, example inputs and leaf modules, and returns a ``TracedModule``. This sub-package may import
``graphs``, ``recording`` and ``nodes``.
"""

from .selection import Leaves, is_container, named_leaves, synthetic_inputs
from .value_tracer import ByValues, LeafKind, trace_again, trace_value

__all__ = ["ByValues", "LeafKind", "Leaves", "is_container", "named_leaves", "synthetic_inputs", "trace_again", "trace_value"]
