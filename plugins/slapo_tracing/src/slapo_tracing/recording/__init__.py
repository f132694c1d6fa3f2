"""Recording of one forward: torch calls become nodes of an ``fx.Graph`` while the forward runs on fake tensors.

A ``Recorder`` takes a module and the arguments of a call. It returns the graph, and the attributes that the forward read and
assigned. The run does not change the model. This sub-package may import ``nodes``.
"""

from .attribute_reads import MODULE_ATTRIBUTES, Attributes
from .module_hooks import HOOK_ATTRIBUTES, WRAPPER_ATTRIBUTES, share_hooks
from .sandbox import PythonRandomState, Sandbox

__all__ = [
    "Attributes",
    "HOOK_ATTRIBUTES",
    "MODULE_ATTRIBUTES",
    "Sandbox",
    "PythonRandomState",
    "WRAPPER_ATTRIBUTES",
    "share_hooks",
]
