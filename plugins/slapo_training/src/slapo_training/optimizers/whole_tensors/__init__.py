"""Whole tensors that an optimizer steps on one owner rank.

Gradients and values are gathered to the owner before a step, and the new values are scattered afterwards; the memory
of a whole tensor exists during a step alone. The local parameters of a process group and their pieces enter; stand-
ins of the whole shape leave. It may import ``slapo_core``, ``options``, ``gradient_hooks`` and ``model``.
"""

from .exchange_routes import LocalBox
from .whole_tensor import WholeTensor, local_of

__all__ = ["LocalBox", "WholeTensor", "local_of"]
