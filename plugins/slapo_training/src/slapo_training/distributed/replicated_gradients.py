"""Check that unsharded parameters have equal gradients on all tensor-parallel ranks; partial gradients differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import is_sharded, shard_spec

_NEAR = 1e-2
"""Largest relative difference of a gradient between ranks."""
_NOISE, _LOW_NOISE = 1e-5, 1e-3
"""Rounding error relative to the norm of all gradients."""


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
