"""The norm of gradients that lie on several ranks, each element counted once."""

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
    """The norm of all gradients: sharded ones are summed over their group, replicated ones and copies counted once.

    Collective over the groups of the shards and ``extra_groups``; gradients are final, data parallelism has reduced them.

    Args:
        parameters: This rank's; those without a gradient count nothing.
        norm_type: Order of the norm; ``math.inf`` is the largest absolute value.
        extra_groups: Ranks that hold other parameters, such as the other pipeline stages.
        counts: Whether this rank counts a parameter; a tied one that two stages hold is counted by one of them.

    Returns:
        A 0-dim fp64 tensor, equal on every rank, whatever the types of their gradients.

    Raises:
        ScheduleError: FSDP2 has cut the parameters once more.
    """
    tensors = list(parameters)
    device = tensors[0].device if tensors else torch.device("cpu")
    buckets: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {None: []}
    for tensor in tensors:
        spec, grad = shard_spec(tensor), plain(tensor.grad)
        bucket = buckets.setdefault(spec.group if spec is not None else None, [])
        if grad is not None and counts(tensor):
            bucket.append(spec.without_copies(grad) if spec is not None else grad)
    total = torch.stack([_over(_power(grads, norm_type, device), norm_type, group) for group, grads in buckets.items()])
    total = total.max() if math.isinf(norm_type) else total.sum()
    for group in extra_groups:
        total = _over(total, norm_type, group)
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
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``; returns the norm before.

    Like ``torch.nn.utils.clip_grad_norm_``, which would count each rank's shards alone. Arguments as ``total_grad_norm``.
    """
    tensors = list(parameters)
    total = total_grad_norm(tensors, norm_type, extra_groups=extra_groups, counts=counts)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in (tensor.grad for tensor in tensors if tensor.grad is not None):
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _power(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The sum of ``|x| ** norm_type`` over all elements, or their largest absolute value; fp64."""
    if not (grads := [grad for grad in grads if grad.numel()]):
        return torch.zeros((), dtype=torch.float64, device=device)
    each = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    norms = torch.stack([norm.to(device, torch.float64) for norm in each])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _over(value: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(value, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return value
