"""Established names of the collectives, for users' own hooks. A group of None is the whole world, as in torch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import collectives
from .collectives import Group


def all_gather_forward_output(
    inp: torch.Tensor, dim: int, group: Group = None, tensor_parallel_output_grad: bool = True
) -> torch.Tensor:
    """All-gather the shards along ``dim``.

    Args:
        inp: This rank's shard.
        dim: Dimension that is sharded.
        group: Ranks in the order of their shards.
        tensor_parallel_output_grad: True if the gradient of the result is partial and must be reduce-scattered; False if it is
            replicated, because each rank computes the same from the result.
    """
    backward = "reduce_scatter" if tensor_parallel_output_grad else "split"
    return collectives.all_gather(inp, dim, _ranks(group), backward=backward)


def reduce_scatter_forward_output(inp: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Sum a partial tensor and keep this rank's shard along ``dim``; the gradient is all-gathered."""
    return collectives.reduce_scatter(inp, dim, _ranks(group))


def scatter_forward_output(inp: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Keep this rank's shard of a replicated tensor along ``dim``; the gradient is all-gathered."""
    return collectives.scatter(inp, dim, _ranks(group))


def reduce_forward_output(inp: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sum a partial tensor; the gradient passes unchanged."""
    return collectives.all_reduce(inp, _ranks(group))


def reduce_backward_grad(inp: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Pass a replicated tensor unchanged; its gradient is summed."""
    return collectives.all_reduce_grad(inp, _ranks(group))


def _ranks(group: Group) -> Group:
    return dist.group.WORLD if group is None and dist.is_initialized() else group
