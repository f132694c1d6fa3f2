"""Tensor-parallel primitives for Slapo, and the collectives and norms they are made of."""

from __future__ import annotations

from slapo_core.grad_norm import clip_grad_norm_

from .collectives import all_gather, all_reduce, all_reduce_grad, reduce_scatter, scatter

__all__ = ["all_gather", "all_reduce", "all_reduce_grad", "clip_grad_norm_", "reduce_scatter", "scatter"]
