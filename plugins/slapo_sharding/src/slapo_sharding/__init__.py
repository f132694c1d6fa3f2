"""Tensor-parallel primitives for Slapo, and the collectives, losses and norms that they use."""

from __future__ import annotations

from slapo_training.distributed import clip_grad_norm_

from .communication.collectives import all_gather, all_reduce, all_reduce_grad, reduce_scatter, scatter
from .communication.cross_entropy import parallel_cross_entropy
from .communication.full_tensors import gather_full, load_full_state, scatter_full
from .rules.rulebook import ShardMethod, register_shard_method
from .rules.sharding_rule import Cut, ShardingRule

__all__ = [
    "Cut",
    "ShardMethod",
    "ShardingRule",
    "all_gather",
    "all_reduce",
    "all_reduce_grad",
    "clip_grad_norm_",
    "gather_full",
    "load_full_state",
    "parallel_cross_entropy",
    "reduce_scatter",
    "register_shard_method",
    "scatter",
    "scatter_full",
]
