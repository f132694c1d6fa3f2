"""Recording of one forward: torch calls become nodes of an ``fx.Graph`` while the forward runs on fake tensors.

A module and the arguments of a call enter. The graph leaves, together with the attributes that the forward read and
assigned. The run leaves the model unchanged. May import ``nodes``.
"""

from .attribute_reads import OF_TORCH, Attributes
from .module_hooks import HOOK_ATTRIBUTES, WRAPPER_ATTRIBUTES, carry_around
from .sandbox import Sandbox, SeparateRandomNumbers

__all__ = [
    "Attributes",
    "HOOK_ATTRIBUTES",
    "OF_TORCH",
    "Sandbox",
    "SeparateRandomNumbers",
    "WRAPPER_ATTRIBUTES",
    "carry_around",
]
