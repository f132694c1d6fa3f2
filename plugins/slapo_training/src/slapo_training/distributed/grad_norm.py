"""Norm of gradients on several ranks, with each element counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from slapo_core import shard_spec

from .full_tensors import plain


def total_grad_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    extra_groups: Sequence[dist.ProcessGroup] = (),
    counts: Callable[[torch.Tensor], bool] = lambda parameter: True,
) -> torch.Tensor:
    """Return the norm of all gradients: sums over the groups of sharded ones, replicated ones counted once.

    Collective over the groups of the shards and ``extra_groups``. Gradients must be reduced over replicas.

    Args:
        parameters: This rank's parameters; those without a gradient count as zero.
        norm_type: Order of the norm; ``math.inf`` is the largest absolute value.
        extra_groups: Groups of ranks with other parameters, e.g. the pipeline stages.
        counts: Returns True if this rank counts a parameter; of two stages with a tied parameter, one counts it.

    Returns:
        A 0-dim fp64 tensor, equal on every rank, whatever the types of their gradients.

    Raises:
        ScheduleError: parameters are also sharded by FSDP2.
    """
    tensors = list(parameters)
    device = tensors[0].device if tensors else torch.device("cpu")
    buckets: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {None: []}
    for tensor in tensors:
        spec, grad = shard_spec(tensor), plain(tensor.grad)
        bucket = buckets.setdefault(spec.group if spec is not None else None, [])
        if grad is not None and counts(tensor):
            bucket.append(spec.without_copies(grad) if spec is not None else grad)
    total = torch.stack([_reduce(_power(grads, norm_type, device), norm_type, group) for group, grads in buckets.items()])
    total = total.max() if math.isinf(norm_type) else total.sum()
    for group in extra_groups:
        total = _reduce(total, norm_type, group)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    extra_groups: Sequence[dist.ProcessGroup] = (),
    counts: Callable[[torch.Tensor], bool] = lambda parameter: True,
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``; return the old norm.

    ``torch.nn.utils.clip_grad_norm_`` would count each rank's shards only. For the arguments see ``total_grad_norm``.
    """
    tensors = list(parameters)
    total = total_grad_norm(tensors, norm_type, extra_groups=extra_groups, counts=counts)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (tensor.grad for tensor in tensors if tensor.grad is not None):
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _power(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the sum of ``|x| ** norm_type`` over all elements, or their largest absolute value, in fp64."""
    if not (grads := [grad for grad in grads if grad.numel()]):
        return torch.zeros((), dtype=torch.float64, device=device)
    each = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    norms = torch.stack([norm.to(device, torch.float64) for norm in each])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _reduce(value: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(value, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return value
