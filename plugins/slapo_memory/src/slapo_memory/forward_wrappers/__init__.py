"""Forward wrappers that save activation memory: recomputation in the backward pass, and offload of saved tensors to
the CPU. In: the forward call of a module. Out: its result, with less memory kept by autograd. May import
``selective_checkpoint`` and ``forward_state``.
"""

from .recomputation import checkpoint

__all__ = ["checkpoint"]
