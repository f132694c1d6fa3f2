"""Differentiable collectives on plain tensors.

A tensor is, over a group, *replicated* (every rank has all of it), *sharded* (every rank has a piece along one dimension)
or *partial* (the sum over ranks is meant). The gradient of a replicated tensor is replicated, that of a sharded tensor
sharded, and a replicated tensor that ranks use in different ways has a partial gradient until somebody reduces it:

    function           forward                    backward
    all_reduce         partial -> replicated      identity
    all_reduce_grad    identity                   partial -> replicated
    all_gather         sharded -> replicated      split: the gradient is replicated already (default), or
                                                  reduce-scatter: each rank used the result in its own way
    reduce_scatter     partial -> sharded         all-gather
    scatter            replicated -> sharded      all-gather

Each returns its input when the group is None or has one rank, works on any dimension (negative too), and changes no tensor
in place. This is the one file that knows torch's functional collectives: they trace, compile and run on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sum a partial tensor over the group; what follows is replicated, so its gradient passes unchanged."""
    return x if num_ranks(group) == 1 else _apply(_AllReduce, x, group)


def all_reduce_grad(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """A replicated tensor, unchanged, whose gradient is summed over the group: each rank uses it for its own shard."""
    return x if num_ranks(group) == 1 else _apply(_AllReduceGrad, x, group)


def all_gather(x: torch.Tensor, dim: int, group: Group = None, *, backward: str = "split") -> torch.Tensor:
    """Put the shards of all ranks together along ``dim``.

    Args:
        x: This rank's shard; the same shape on every rank.
        dim: Dimension that is sharded.
        group: Ranks in the order of their shards.
        backward: ``"split"`` where all ranks compute the same from the result, so that each has the whole gradient;
            ``"reduce_scatter"`` where each rank has only its part of the sum.

    Raises:
        ValueError: another ``backward``.
    """
    if backward not in ("split", "reduce_scatter"):
        raise ValueError(f"backward of all_gather is {backward!r}; 'split' and 'reduce_scatter' are known")
    return x if num_ranks(group) == 1 else _apply(_AllGather, x, dim % x.dim(), group, backward)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Sum a partial tensor over the group and keep this rank's piece along ``dim``.

    Raises:
        ValueError: the size along ``dim`` is not divisible by the group size.
    """
    return x if num_ranks(group) == 1 else _apply(_ReduceScatter, x, dim % x.dim(), group)


def scatter(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """This rank's piece of a replicated tensor along ``dim``; the gradient is gathered to the whole one.

    Raises:
        ValueError: the size along ``dim`` is not divisible by the group size.
    """
    return x if num_ranks(group) == 1 else _apply(_Scatter, x, dim % x.dim(), group)


def total(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sum over the group, without a gradient."""
    return x if num_ranks(group) == 1 else _reduce(x, "sum", group)


def largest(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Elementwise maximum over the group, without a gradient."""
    return x if num_ranks(group) == 1 else _reduce(x, "max", group)


def _apply(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def num_ranks(group: Group) -> int:
    """Size of the group; no group is one rank."""
    return 1 if group is None else group.size()


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _AllReduceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup, backward: str) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.cut = dim, group, _piece if backward == "split" else _sum_piece
        return _join(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.cut(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _sum_piece(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _join(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _piece(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _join(grad, ctx.dim, ctx.group), None, None


_ops = torch.ops._c10d_functional


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _reduce(x, "sum", group)


def _reduce(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    result: torch.Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.group_name))
    return result


def _join(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather along ``dim``; the backend puts ranks along dimension 0."""
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(gathered.chunk(group.size()), dim) if dim else gathered


def _sum_piece(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter along ``dim``; the backend cuts along dimension 0."""
    _check_divides(x, dim, group)
    rows = torch.cat(x.chunk(group.size(), dim)) if dim else x.contiguous()
    result: torch.Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", group.size(), group.group_name))
    return result


def _piece(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    _check_divides(x, dim, group)
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _check_divides(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> None:
    if x.size(dim) % group.size():
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} is not divisible by {group.size()} ranks")
