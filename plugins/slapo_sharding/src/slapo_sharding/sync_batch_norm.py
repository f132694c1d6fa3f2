"""``sync_batch_norm``: BatchNorm statistics over all data-parallel replicas.

Each replica computes the count, the mean and the summed squared deviations (M2) of its own values. These are gathered and
combined by the method of Chan, Golub and LeVeque. It stays accurate for a small variance beside a large mean, because it never
subtracts squares of values from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from slapo_core import Primitive, Schedule, ScheduleError, get_logger
from slapo_tracing.nodes import forward_wrappers, own_forward, wrap_forward

from .communication import collectives
from .communication.collectives import Group

_FORWARDS = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)
"""Forwards that the wrapper may replace; BatchNorm 1d, 2d, 3d, lazy ones and most subclasses share one function."""


class SyncBatchNormPrimitive(Primitive):
    """Compute the training statistics of every BatchNorm of this module over all data-parallel replicas.

    Rewrite:
        BatchNorm(x of this replica's rows)  -->  BatchNorm(the rows of all replicas), this replica's part of the output

    Output, gradients and running statistics in training are then those of the unmodified model on the whole batch, even if
    replicas have different numbers of rows. The layers keep their class and the names of their state. Evaluation does not
    change. Replicas are the ranks along the mesh's axis ``dp``; a schedule without a mesh gets one in ``build``.

    The statistics are those of one micro-batch: with ``microbatches=`` above 1 they differ from the whole batch's, as they do
    without replicas.

    The layers are BatchNorm 1d, 2d and 3d, lazy ones among them, subclasses that keep BatchNorm's forward, and
    ``SyncBatchNorm``, which then also trains on a CPU. Layers that have these statistics already are skipped.

    Raises:
        ScheduleError: no such layer here or below, or only layers whose forward was replaced or traced.
    """

    name = "sync_batch_norm"

    @staticmethod
    def check(schedule: Schedule) -> list[nn.Module]:
        """Find the layers."""
        named = dict(schedule.mod.named_modules())
        layers = [part for part in named.values() if _has_batch_norm_forward(part)]
        others = [path for path, part in named.items() if isinstance(part, _BatchNorm) and part not in layers]
        if not layers:
            found = f"; {others[0]!r} has a forward of its own, which may compute something else" if others else ""
            message = f"no BatchNorm here or below{found}; call it on a module with BatchNorm layers"
            raise ScheduleError(message, path=schedule.path, primitive="sync_batch_norm")
        if others:
            left = ", ".join(others)
            get_logger().warning("sync_batch_norm leaves %s as it is: its forward is not that of BatchNorm", left)
        return layers

    @staticmethod
    def apply(schedule: Schedule, *, checked: list[nn.Module]) -> None:
        """Wrap the forwards, inside the wrappers that they have already."""
        group = replicas_of(schedule)
        for layer in checked:
            if statistics_of(layer) is None:
                wrap_forward(layer, ReplicaStatistics(group), innermost=True)


def _has_batch_norm_forward(module: Any) -> bool:
    return type(module).forward in _FORWARDS and own_forward(module) is None


class ReplicaStatistics:
    """Forward wrapper of a BatchNorm whose training statistics are those of all data-parallel replicas.

    Attributes:
        group: The replicas; None before ``build`` has made them, and if there is only one.
        over_replicas: Tells an engine's first-step checks that with one micro-batch these are the whole batch's statistics.
    """

    over_replicas = True

    def __init__(self, group: Group = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaStatistics:
        return ReplicaStatistics(self.group)  # groups cannot be copied

    def __call__(self, call: Callable[..., Any], input: torch.Tensor) -> Any:
        """Run the layer's forward. Collective over the replicas in training."""
        module = wrapped_module(call)
        alone = collectives.num_ranks(self.group) == 1
        if not module.training or (alone and not isinstance(module, nn.SyncBatchNorm)):
            return call(input)
        module._check_input_dim(input)
        weight, bias = module.weight, module.bias
        normalise: Any = _Normalise.apply
        output, count, mean, squares = normalise(input, weight, bias, module.eps, self.group)
        _update(module, count, mean, squares)
        return output


def wrapped_module(call: Callable[..., Any]) -> Any:
    """Return the layer whose forward a wrapper calls, through other wrappers in between."""
    while isinstance(call, partial):
        call = call.args[0]
    return call.__self__  # type: ignore[attr-defined]


@torch.no_grad()
def _update(module: Any, count: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor) -> None:
    """Advance the running statistics as BatchNorm does, by the mean and the unbiased variance of the whole batch."""
    if not module.track_running_stats or module.running_mean is None:
        return
    momentum: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / module.num_batches_tracked.to(mean)
    momentum = 0.0 if momentum is None else momentum
    for running, found in ((module.running_mean, mean), (module.running_var, squares / (count - 1).clamp(min=1))):
        running.copy_(running.to(found) * (1 - momentum) + found * momentum)


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all ranks; also return the count of values, and mean and M2 per channel."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: Group
    ) -> tuple[torch.Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        count, mean, squares = _combined_statistics(x.to(wide), group)
        scale = torch.rsqrt(squares / count + eps)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.mark_non_differentiable(count, mean, squares)
        factor = scale if weight is None else scale * weight
        output = (x.to(wide) - _per_channel(mean, x)) * _per_channel(factor, x)
        output = output if bias is None else output + _per_channel(bias, x)
        return output.to(x.dtype), count, mean, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = _reduced_dims(x)
        grad = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(scale, x)
        own = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = collectives.sum_over_ranks(own, ctx.group) / count
            factor = scale if weight is None else scale * weight
            of_input = (grad - _per_channel(sums[0], x) - normal * _per_channel(sums[1], x)) * _per_channel(factor, x)
            of_input = of_input.to(x.dtype)
        of_weight = own[1].to(weight.dtype) if weight is not None else None
        return of_input, of_weight, own[0].to(weight.dtype) if ctx.has_bias else None, None, None


def _combined_statistics(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, mean and M2 of all ranks' values per channel; a rank may have no rows."""
    dims, channels = _reduced_dims(x), x.size(1)
    size = x.numel() // max(channels, 1)
    mean = x.mean(dims) if size else x.new_zeros(channels)
    squares = (x - _per_channel(mean, x)).square().sum(dims)
    own = torch.stack([torch.full_like(mean, size), mean, squares])
    counts, means, each = own[None].unbind(1)
    if collectives.num_ranks(group) > 1:
        counts, means, each = collectives.all_gather(own[None], 0, group).unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return count, mean, (each + counts * (means - mean).square()).sum(0)


def _reduced_dims(x: torch.Tensor) -> list[int]:
    """Return all dimensions but the channel dimension."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return one value per channel in a shape that broadcasts over the input."""
    return values.view(-1, *(1,) * (x.dim() - 2))


def replicas_of(schedule: Schedule) -> Group:
    """Return the group of this rank's data-parallel replicas in the schedule's mesh; None if there is only one."""
    mesh = schedule.mesh
    if mesh is None or "dp" not in (mesh.mesh_dim_names or ()) or mesh["dp"].size() == 1:
        return None
    return mesh["dp"].get_group()


def resolve_replicas(schedule: Schedule) -> None:
    """Set the group of replicas of layers that were synced before the schedule had a mesh."""
    group = replicas_of(schedule)
    for module in schedule.get_top_schedule().mod.modules():
        if (found := statistics_of(module)) is not None:
            found.group = group


def statistics_of(module: nn.Module) -> ReplicaStatistics | None:
    """Return the wrapper that gives a layer the statistics of all replicas, or None."""
    return next((wrapper for wrapper in forward_wrappers(module) if isinstance(wrapper, ReplicaStatistics)), None)
