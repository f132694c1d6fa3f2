"""Norms and variances along a dimension that is sharded into equal parts.

Each function reduces its statistics over the ranks: one all-reduce for the mean and one for the mean of squares in the
forward, and as many in the backward. Statistics are computed in float32 at least, as in torch's own norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from slapo_tracing.nodes import function_name

from ..communication.collectives import Group, all_reduce, all_reduce_grad, num_ranks
from ..rules.sharding_rule import computes_as


def layer_norm(
    group: Group,
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return this rank's shard of ``F.layer_norm`` over the last dimension; weight and bias are sharded too."""
    given = _at_least_float32(x)
    centered = given - statistic(given.mean(-1, keepdim=True), group)
    normed = centered * torch.rsqrt(statistic(centered.square().mean(-1, keepdim=True), group) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(_output_dtype(F.layer_norm, x))


def rms_norm(
    group: Group, x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Return this rank's shard of ``F.rms_norm`` over the last dimension; the weight is sharded too."""
    given = _at_least_float32(x)
    least = torch.finfo(x.dtype).eps if eps is None else eps
    normed = given * torch.rsqrt(statistic(given.square().mean(-1, keepdim=True), group) + least)
    return (normed if weight is None else normed * weight).to(_output_dtype(F.rms_norm, x))


def variance(
    group: Group, x: torch.Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> torch.Tensor:
    """Return ``x.var`` along a sharded dimension; the result is replicated."""
    (along,) = (dim,) if isinstance(dim, int) else dim
    number = x.size(along) * num_ranks(group)
    mean = statistic(x.mean(along, keepdim=True), group)
    found = mean_over_group((x - mean).square().mean(along, keepdim=keepdim), group)
    return found * (number / (number - (int(unbiased) if correction is None else correction)))


def standard_deviation(group: Group, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``x.std`` along a sharded dimension; the result is replicated."""
    return variance(group, x, *args, **kwargs).sqrt()


def mean_over_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean over the group of local means over equal parts."""
    return all_reduce(x, group) / num_ranks(group)


def statistic(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean over the group, for use on each rank's shard: the gradient is reduced."""
    return all_reduce_grad(mean_over_group(x, group), group)


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _output_dtype(norm: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.dtype:
    """Return the dtype of torch's own norm, which autocast may choose."""
    return norm(x.new_zeros(1, 1), (1,)).dtype if torch.is_autocast_enabled(x.device.type) else x.dtype


_NORMS: dict[str, Callable[..., torch.Tensor]] = {"layer_norm": layer_norm, "rms_norm": rms_norm}
_VARIANCES: dict[str, Callable[..., torch.Tensor]] = {"var": variance, "std": standard_deviation}
_MODULES: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.LayerNorm: layer_norm, nn.RMSNorm: rms_norm}


def norm_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return the sharded norm for a module that norms over the last dimension, or None."""
    kind = next((kind for kind in _MODULES if computes_as(module, kind)), None)
    return None if kind is None or len(module.normalized_shape) != 1 else _MODULES[kind]  # type: ignore[arg-type]


def norm_in(node: fx.Node) -> Callable[..., torch.Tensor] | None:
    """Return the sharded norm for a node that norms over the last dimension, or None."""
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape", ())
    found = _NORMS.get(function_name(node))
    return found if node.op == "call_function" and isinstance(shape, tuple | list) and len(shape) == 1 else None


def variance_in(node: fx.Node) -> Callable[..., torch.Tensor] | None:
    """Return the sharded variance or standard deviation for a node over one dimension, or None."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    along = [dim] if isinstance(dim, int) and not isinstance(dim, bool) else dim
    is_one_dim = isinstance(along, tuple | list) and len(along) == 1
    return _VARIANCES.get(function_name(node)) if is_one_dim and "out" not in node.kwargs else None
