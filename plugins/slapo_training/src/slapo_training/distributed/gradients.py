"""Gradients on several ranks: their norm, with each element counted once, and a check that unsharded ones are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import ScheduleError, is_sharded, shard_spec

_NEAR = 1e-2
"""Largest relative difference of a gradient between ranks."""
_NOISE, _LOW_NOISE = 1e-5, 1e-3
"""Rounding error relative to the norm of all gradients."""


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor, detached; refuse DTensors of FSDP2 and empty parameters of ZeRO-3, which shards do not describe."""
    became = "a DTensor, as in FSDP2" if hasattr(tensor, "placements") else "empty, as in ZeRO-3"
    if hasattr(tensor, "placements") or getattr(tensor, "ds_shape", None) not in (None, getattr(tensor, "shape", None)):
        raise ScheduleError(f"a parameter has become {became}; leave that out, or ask inside of engine.whole_parameters()")
    return tensor.detach() if tensor is not None else None


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


@torch.no_grad()
def compare_gradients(
    parameters: Mapping[str, nn.Parameter], whole: Mapping[str, nn.Parameter], low_precision: bool = False
) -> tuple[str | None, set[str]]:
    """Compare gradients over the tensor-parallel group. Collective over it; no message if no parameter is sharded.

    ``whole`` are the unsharded parameters, the same on every rank; a missing gradient counts as zero. With ``low_precision``
    the rounding errors are those of bf16, whatever the dtype of the parameters.

    Returns:
        Message for the first gradient that differs, or None; and the names of nonzero gradients. Both are the same on every
        rank of the group. Gradients that are not finite are not reported.
    """
    group = next((spec.group for p in parameters.values() if is_sharded(p) and (spec := shard_spec(p))), None)
    if group is None or not whole:
        return None, set(whole)
    low_precision = low_precision or any(parameter.element_size() < 4 for parameter in whole.values())
    noise = _LOW_NOISE if low_precision else _NOISE
    rows = [_row(parameter, group) for parameter in whole.values()]
    norms = [torch.linalg.vector_norm(_dense(p.grad)).float() for p in parameters.values() if p.grad is not None]
    total = torch.stack(norms).norm() if norms else rows[0][0] * 0
    table = torch.stack([*rows, total.expand(2)])
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    *found, (_, largest) = table.tolist()
    named = dict(zip(whole, found, strict=True))
    wrong = next((name for name, (far, norm) in named.items() if far > _NEAR * norm + noise * largest), None)
    message = None if wrong is None else _message(wrong, *named[wrong])
    return message, {name for name, (far, norm) in named.items() if far or norm}


def _message(name: str, far: float, norm: float) -> str:
    return (
        f"the gradient of {name!r}, which is whole, differs between tensor-parallel ranks by {far:.1e} of {norm:.1e}; "
        "if it meets sharded values each rank has a part, which sync('grad', 'all_reduce') of its module sums; "
        "else let all ranks compute, and draw random numbers, alike"
    )


def _row(parameter: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the distance of this rank's gradient from the mean, and the norm of the mean."""
    own = torch.zeros_like(parameter) if parameter.grad is None else _dense(parameter.grad)
    own = own.float() if own.element_size() < 4 else own
    mean = own.clone()
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    return torch.stack([torch.linalg.vector_norm(own - mean), torch.linalg.vector_norm(mean)]).float()


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.layout != torch.strided else grad
