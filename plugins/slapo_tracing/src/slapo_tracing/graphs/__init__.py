"""Traced modules: the graphs of one module, and the guards that choose a graph for a call.

This sub-package may import ``recording`` and ``nodes``.
"""

from ..nodes.opaque_modules import as_original
from .guard import Call, Guard, argument_values, plain_signature
from .traced_module import TracedModule, as_untraced, guard_of, input_check_of
from .variants import Variant, meta_copy

__all__ = [
    "Call",
    "Guard",
    "TracedModule",
    "Variant",
    "argument_values",
    "as_original",
    "as_untraced",
    "guard_of",
    "input_check_of",
    "meta_copy",
    "plain_signature",
]
