"""Tensor parallelism: what hooks communicate by, and rules of one's own."""

from slapo_sharding import Cut, ShardingRule, ShardMethod, register_shard_method

from . import sync_ops
from .sync_ops import (
    all_gather_forward_output,
    reduce_backward_grad,
    reduce_forward_output,
    reduce_scatter_forward_output,
    scatter_forward_output,
)

__all__ = [
    "Cut",
    "ShardMethod",
    "ShardingRule",
    "all_gather_forward_output",
    "reduce_backward_grad",
    "reduce_forward_output",
    "reduce_scatter_forward_output",
    "register_shard_method",
    "scatter_forward_output",
    "sync_ops",
]
