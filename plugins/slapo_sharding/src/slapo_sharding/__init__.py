"""Tensor-parallel primitives for Slapo, and the collectives, losses and norms that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names
from slapo_training.distributed import clip_grad_norm_

if TYPE_CHECKING:
    from .communication.collectives import all_gather, all_reduce, all_reduce_grad, reduce_scatter, scatter
    from .communication.cross_entropy import parallel_cross_entropy
    from .communication.full_tensors import gather_full, load_full_state, scatter_full
    from .rules.rulebook import ShardMethod, register_shard_method
    from .rules.sharding_rule import Cut, ShardingRule
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "communication.collectives": ["all_gather", "all_reduce", "all_reduce_grad", "reduce_scatter", "scatter"],
            "communication.cross_entropy": ["parallel_cross_entropy"],
            "communication.full_tensors": ["gather_full", "load_full_state", "scatter_full"],
            "rules.rulebook": ["ShardMethod", "register_shard_method"],
            "rules.sharding_rule": ["Cut", "ShardingRule"],
        },
    )

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
