"""Differentiable collectives on plain tensors.

Over a group, a tensor is *replicated* (every rank has all of it), *sharded* (every rank has a shard along one dimension) or
*partial* (its value is the sum over ranks). The gradient of a replicated tensor is replicated, and the gradient of a sharded
tensor is sharded. A replicated tensor that ranks use in different ways has a partial gradient until it is reduced:

    function           forward                    backward
    all_reduce         partial -> replicated      identity
    all_reduce_grad    identity                   partial -> replicated
    all_gather         sharded -> replicated      split: the gradient is replicated (default), or
                                                  reduce-scatter: the gradient is partial
    reduce_scatter     partial -> sharded         all-gather
    scatter            replicated -> sharded      all-gather
    all_to_all         sharded -> sharded         all-to-all: along another dimension, and back

Each function returns its input if the group is None or has one rank, takes any dimension (negative too), and changes no tensor
in place. A backward can be differentiated again by ``torch.autograd.grad``. The transforms of ``torch.func`` (``grad``,
``vmap``, ``jvp``) are not supported, and torch refuses them. Only this file calls torch's functional collectives, which trace,
compile and run on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ._torch_autograd import is_batched
from .shard_ranges import shard_range

Group = dist.ProcessGroup | None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sum a partial tensor over the group; the result is replicated, so the gradient passes unchanged."""
    return x if num_ranks(group) == 1 else apply_function(_AllReduce, x, group)


def all_reduce_grad(x: torch.Tensor, group: Group = None, *, split_backward: bool = False) -> torch.Tensor:
    """Return a replicated tensor unchanged and sum its gradient over the group, for use by each rank's own shard.

    Args:
        x: The same on every rank.
        group: Ranks that use it.
        split_backward: Start the all-reduce in one autograd node and wait for it in another, recorded earlier. Nodes that run
            between the two overlap with the all-reduce.
    """
    if group is None or num_ranks(group) == 1:
        return x
    if split_backward:
        return apply_function(_StartGradAllReduce, apply_function(_WaitGrad, x), group)
    return apply_function(_AllReduceGrad, x, group)


def all_gather(
    x: torch.Tensor,
    dim: int,
    group: Group = None,
    *,
    backward: str = "split",
    size: int | None = None,
    split_backward: bool = False,
) -> torch.Tensor:
    """Join the shards of all ranks along ``dim``.

    Args:
        x: This rank's shard; the same shape on every rank.
        dim: Dimension that is sharded.
        group: Ranks in the order of their shards.
        backward: ``"split"`` if all ranks compute the same from the result, so that the gradient is replicated;
            ``"reduce_scatter"`` if the gradient is partial.
        size: Size of the result along ``dim``, for shards as ``torch.chunk`` makes them: the last ones are smaller or empty.
        split_backward: Start the reduce-scatter of the backward in one node and wait for it in another, as in
            ``all_reduce_grad``.

    Raises:
        ValueError: another ``backward``, or a shard whose size is not this rank's part of ``size``.
    """
    if backward not in ("split", "reduce_scatter"):
        raise ValueError(f"backward of all_gather is {backward!r}; use 'split' or 'reduce_scatter'")
    if group is None or num_ranks(group) == 1:
        return x
    dim = dim % x.dim()
    if size is not None and x.size(dim) != _piece_size(size, group):
        raise ValueError(f"dim {dim} of a shard of shape {tuple(x.shape)} is not rank {group.rank()}'s part of {size}")
    if split_backward and backward == "reduce_scatter":
        return apply_function(_GatherStartGradReduceScatter, apply_function(_WaitGrad, x), dim, group, backward, size)
    return apply_function(_AllGather, x, dim, group, backward, size)


def reduce_scatter(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Sum a partial tensor over the group and keep this rank's shard along ``dim``.

    Raises:
        ValueError: the size along ``dim`` is not divisible by the group size.
    """
    if group is None or num_ranks(group) == 1:
        return x
    _check_divides(x, dim % x.dim(), group)
    return apply_function(_ReduceScatter, x, dim % x.dim(), group)


def scatter(x: torch.Tensor, dim: int, group: Group = None, *, uneven: bool = False) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor along ``dim``; the gradient is all-gathered.

    Args:
        x: The same on every rank.
        dim: Dimension to split.
        group: Ranks in the order of their shards.
        uneven: Split a size that is not divisible, as ``torch.chunk`` does: the last shards are smaller or empty.

    Raises:
        ValueError: the size along ``dim`` is not divisible by the group size.
    """
    if group is None or num_ranks(group) == 1:
        return x
    if not uneven:
        _check_divides(x, dim % x.dim(), group)
    return apply_function(_Scatter, x, dim % x.dim(), group)


def all_to_all(x: torch.Tensor, dim: int, new_dim: int, group: Group = None) -> torch.Tensor:
    """Return a tensor that is sharded along ``dim``, sharded along ``new_dim`` instead.

    Args:
        x: This rank's shard along ``dim``; the same shape on every rank.
        dim: Dimension that is gathered.
        new_dim: Dimension to split.
        group: Ranks in the order of their shards.

    Raises:
        ValueError: the size along ``new_dim`` is not divisible by the group size.
    """
    if group is None or num_ranks(group) == 1:
        return x
    _check_divides(x, new_dim % x.dim(), group)
    return apply_function(_AllToAll, x, dim % x.dim(), new_dim % x.dim(), group)


def sum_over_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group, without a gradient."""
    return x if num_ranks(group) == 1 else _reduce(x, "sum", group)


def max_over_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the elementwise maximum over the group, without a gradient."""
    return x if num_ranks(group) == 1 else _reduce(x, "max", group)


def on_first_rank(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``x`` on the first rank and zeros elsewhere, for a sum over ranks; the gradient of ``x`` is whole on all ranks."""
    return x if group is None or group.rank() == 0 else x - x.detach()


def apply_function(function: Any, *args: Any) -> torch.Tensor:
    """Call an autograd function; ``Function.apply`` has no types."""
    result: torch.Tensor = function.apply(*args)
    return result


def num_ranks(group: Group) -> int:
    """Return the size of the group, 1 for None."""
    return 1 if group is None else group.size()


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_grad(grad, ctx.group), None


class _AllReduceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup, backward: str, size: int | None) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.cut = dim, group, _Scatter if backward == "split" else _ReduceScatter
        size = group.size() * x.size(dim) if size is None else size
        return wait_all_gather(start_all_gather(x, dim, group, size), dim, group, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return apply_function(ctx.cut, grad, ctx.dim, ctx.group), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.size(dim)
        ranks, size = group.size(), x.size(dim)
        if size % ranks:
            x = _pad_to_size(x, dim, -(-size // ranks) * ranks)
        result: torch.Tensor = _ops.wait_tensor(_start_reduce_scatter(x, dim, group))
        return result.narrow(dim, 0, _piece_size(size, group)) if size % ranks else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather(grad, ctx.dim, ctx.group, backward="reduce_scatter", size=ctx.size), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.size(dim)
        start, stop = shard_range(x.size(dim), group.size(), group.rank())
        return x.narrow(dim, start, stop - start).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather(grad, ctx.dim, ctx.group, size=ctx.size), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, new_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.new_dim, ctx.group = dim, new_dim, group
        ranks = group.size()  # each gets its shard along new_dim; the received shards are joined along dim
        rows = torch.stack(_checked_unbatched(x).chunk(ranks, new_dim))
        sent = _ops.wait_tensor(_ops.all_to_all_single(rows, [1] * ranks, [1] * ranks, group.group_name))
        return torch.cat(sent.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_to_all(grad, ctx.new_dim, ctx.dim, ctx.group), None, None, None


class _StartGradAllReduce(_AllReduceGrad):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled() or torch.is_anomaly_enabled():  # a second backward, or anomaly mode, reads the result
            return all_reduce(grad, ctx.group), None
        return _start_reduction(grad, "sum", ctx.group), None


class _GatherStartGradReduceScatter(_AllGather):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        uneven = grad.size(ctx.dim) % ctx.group.size()  # padding is cut off after the wait, so one node must do both
        if torch.is_grad_enabled() or torch.is_anomaly_enabled() or uneven:
            return _AllGather.backward(ctx, grad)
        return _start_reduce_scatter(grad, ctx.dim, ctx.group), None, None, None, None


class _WaitGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad if torch.is_grad_enabled() else _ops.wait_tensor(grad)


_ops = torch.ops._c10d_functional


def _reduce(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    if x.is_nested:  # torch's encoders make nested tensors of padded ones, in evaluation
        from ._torch_private import with_values  # noqa: PLC0415  it imports torch.distributed.tensor

        return with_values(x, _reduce(x.values(), op, group))
    result: torch.Tensor = _ops.wait_tensor(_start_reduction(x, op, group))
    return result


def _start_reduction(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    return _ops.all_reduce(_checked_unbatched(x).contiguous(), op, group.group_name)  # type: ignore[no-any-return]


def _checked_unbatched(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling() and is_batched(x):  # torch would send the memory of the wrapper, not its values
        raise RuntimeError("a collective of sharded layers takes one gradient at a time; leave out is_grads_batched and vmap")
    return x


def start_all_gather(x: torch.Tensor, dim: int, group: Group, size: int) -> torch.Tensor:
    """Start an all-gather to ``size`` along ``dim``. The backend joins shards of equal size along dimension 0."""
    assert group is not None
    own = _checked_unbatched(x)
    own = _pad_to_size(own, dim, -(-size // group.size())) if size % group.size() else own.contiguous()
    return _ops.all_gather_into_tensor(own, group.size(), group.group_name)  # type: ignore[no-any-return]


def wait_all_gather(started: torch.Tensor, dim: int, group: Group, size: int) -> torch.Tensor:
    """Wait for ``start_all_gather`` and return the shards joined along ``dim``."""
    assert group is not None
    gathered: torch.Tensor = _ops.wait_tensor(started)
    uneven = size % group.size()
    if not dim:
        return gathered.narrow(0, 0, size) if uneven else gathered
    parts = list(gathered.chunk(group.size()))
    if uneven:
        parts = [part.narrow(dim, 0, _piece_size(size, group, rank)) for rank, part in enumerate(parts)]
    return torch.cat(parts, dim)


def _start_reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Start a reduce-scatter along ``dim``. The backend splits along dimension 0, into equal shards."""
    rows = torch.cat(_checked_unbatched(x).chunk(group.size(), dim)) if dim else _checked_unbatched(x).contiguous()
    return _ops.reduce_scatter_tensor(rows, "sum", group.size(), group.group_name)  # type: ignore[no-any-return]


def _piece_size(size: int, group: dist.ProcessGroup, rank: int | None = None) -> int:
    start, stop = shard_range(size, group.size(), group.rank() if rank is None else rank)
    return stop - start


def _pad_to_size(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.size(dim)])


def _check_divides(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> None:
    if x.size(dim) % group.size():
        what = f"dim {dim} of a tensor of shape {tuple(x.shape)} is not divisible by {group.size()} ranks"
        raise ValueError(f"{what}; pad it (a sequence, say)")
