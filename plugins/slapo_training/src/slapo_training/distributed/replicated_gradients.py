"""Whole parameters have equal gradients on all tensor-parallel ranks; where each rank has only its part, nobody summed them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import is_sharded, shard_spec

_NEAR = 1e-2
"""Share of a gradient by which ranks may differ."""
_NOISE, _LOW_NOISE = 1e-5, 1e-3
"""Share of the norm of all gradients that may be rounding."""


@torch.no_grad()
def compare_gradients(
    parameters: Mapping[str, nn.Parameter], whole: Mapping[str, nn.Parameter], low_precision: bool = False
) -> tuple[str | None, set[str]]:
    """Compare gradients over the tensor-parallel group. Collective over it; nothing is sent where nothing is sharded.

    Args:
        parameters: This rank's, by their names.
        whole: Those out of them to compare, the same on every rank; one without a gradient counts as zero.
        low_precision: Whether rounding is that of bf16, whatever the type of the parameters.

    Returns:
        What is wrong with the first one that differs, in one sentence, or None; and the names of those whose gradient is not
        zero. The same on every rank of the group. Gradients that are not finite are left to others to complain about.
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
    """How far this rank's gradient is from the mean, and the norm of the mean."""
    own = torch.zeros_like(parameter) if parameter.grad is None else _dense(parameter.grad)
    own = own.float() if own.element_size() < 4 else own
    mean = own.clone()
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    return torch.stack([torch.linalg.vector_norm(own - mean), torch.linalg.vector_norm(mean)]).float()


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.layout != torch.strided else grad
