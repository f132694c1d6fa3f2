"""Collectives and functions built on them alone, without any knowledge of modules or sharding rules.

What enters is a tensor and a process group. What leaves is a tensor that is replicated, sharded or partial over that
group, with the matching gradient. This is the lowest room of the package: it imports ``slapo_core`` and torch, and no
other room. Torch's functional collectives are called in ``collectives`` only. Torch's private names are in
``_torch_private`` and, where DTensor must not be imported, in ``_torch_autograd``.
"""

from .cross_entropy import ParallelCrossEntropy, vocab_parallel_cross_entropy
from .sync_ops import (
    all_gather_forward_output,
    reduce_backward_grad,
    reduce_forward_output,
    reduce_scatter_forward_output,
    scatter_forward_output,
)

__all__ = [
    "ParallelCrossEntropy",
    "all_gather_forward_output",
    "reduce_backward_grad",
    "reduce_forward_output",
    "reduce_scatter_forward_output",
    "scatter_forward_output",
    "vocab_parallel_cross_entropy",
]
