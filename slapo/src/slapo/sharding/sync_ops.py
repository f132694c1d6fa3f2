"""Collectives with gradients."""

from slapo_sharding.communication import (
    all_gather_forward_output,
    reduce_backward_grad,
    reduce_forward_output,
    reduce_scatter_forward_output,
    scatter_forward_output,
)

__all__ = [
    "all_gather_forward_output",
    "reduce_backward_grad",
    "reduce_forward_output",
    "reduce_scatter_forward_output",
    "scatter_forward_output",
]
