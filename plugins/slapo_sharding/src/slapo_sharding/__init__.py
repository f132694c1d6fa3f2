"""Tensor-parallel primitives for Slapo, and the collectives, losses and norms they are made of."""

from __future__ import annotations

from slapo_training.grad_norm import clip_grad_norm_

from .collectives import all_gather, all_reduce, all_reduce_grad, reduce_scatter, scatter
from .cross_entropy import parallel_cross_entropy
from .full_tensors import gather_full, load_full_state, scatter_full
from .rules import Cut, ShardingRule
from .shard_method import ShardMethod, register_shard_method

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
