"""Rules for Linear, Embedding and Transformers' Conv1D."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_tracing.nodes import as_layer

from .linear_subclasses import computes_linear, only_input
from .sharding_rule import Cut, ShardingRule, applied_cut, computes_as


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear, or a subclass that computes the same."""
    return computes_as(module, nn.Linear) or (isinstance(module, nn.Linear) and computes_linear(module))


def is_linear_of_op(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of ``slapo.op`` without dropout and ``sync_fn``; compared by name."""
    known = isinstance(module, nn.Linear) and type(module).__module__ == "slapo_kernels.layers.linear"
    return known and getattr(module, "sync_fn", None) is None and not getattr(module, "p", 0)


def has_activation(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of ``slapo.op`` with an activation, which needs the reduced sum."""
    return is_linear_of_op(module) and hasattr(module, "activation")


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is an Embedding, or a subclass with the same forward."""
    return computes_as(module, nn.Embedding)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' Conv1D, a linear layer with ``weight[in, out]``; compared by name."""
    cls = type(as_layer(module))
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def linear_without_bias(module: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a row-parallel Linear: a partial output. A subclass may name its input differently."""
    x = args[0] if len(args) == 1 and not kwargs else only_input(module, args, kwargs)
    return F.linear(x, module.weight)


def conv1d_without_bias(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a row-parallel Conv1D: a partial output."""
    return torch.matmul(x, module.weight)


def vocabulary_lookup(module: Any, input: torch.Tensor) -> torch.Tensor:
    """Forward of a vocabulary-parallel Embedding: rows that this rank owns, and zeros for rows of other ranks.

    An index outside the whole vocabulary stays outside, so that it fails on every rank as in the unmodified module.
    """
    applied = applied_cut(module)
    assert applied is not None
    spec = applied.spec
    ((start, stop),) = spec.ranges()
    owned = (input >= start) & (input < stop)
    elsewhere = ~owned & (input >= 0) & (input < spec.full_shape[0])
    padding = module.padding_idx
    local_padding = padding - start if padding is not None and start <= padding < stop else None
    rows = F.embedding((input - start).masked_fill(elsewhere, 0), module.weight, local_padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def _refuse_embedding(module: nn.Module, cut: Cut) -> str | None:
    if module.sparse:
        return "sparse gradients cannot be sharded; use sparse=False"
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} rescales whole rows in place; use max_norm=None"
    if module.scale_grad_by_freq and cut.dims["weight"] == 0:
        return "scale_grad_by_freq counts indices of other ranks; use scale_grad_by_freq=False or axis 1"
    return None


LINEAR = ShardingRule(
    "Linear",
    is_linear,
    (
        Cut({"weight": 0, "bias": 0}, "replicated", "sharded", ("out_features",), uneven=True),
        Cut({"weight": 1}, "sharded", "partial", ("in_features",), linear_without_bias, late_bias=True, uneven=True),
    ),
)
LINEAR_WITH_ACT = ShardingRule("LinearWithAct", has_activation, LINEAR.cuts[:1])
LINEAR_OF_OP = ShardingRule("LinearWithSeparateBias", is_linear_of_op, LINEAR.cuts)
EMBEDDING = ShardingRule(
    "Embedding",
    is_embedding,
    (
        Cut({"weight": 0}, "indices", "partial", ("num_embeddings",), vocabulary_lookup, fusable=False, uneven=True),
        Cut({"weight": 1}, "indices", "sharded", ("embedding_dim",), uneven=True),
    ),
    _refuse_embedding,
)
CONV1D = ShardingRule(
    "Transformers Conv1D",
    is_conv1d,
    (
        Cut({"weight": 1, "bias": 0}, "replicated", "sharded", ("nf",), uneven=True),
        Cut({"weight": 0}, "sharded", "partial", ("nx",), conv1d_without_bias, late_bias=True, uneven=True),
    ),
)
RULES = (LINEAR, LINEAR_WITH_ACT, LINEAR_OF_OP, EMBEDDING, CONV1D)
