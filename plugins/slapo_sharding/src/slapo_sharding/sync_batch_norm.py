"""``sync_batch_norm``: BatchNorm statistics over all data-parallel replicas."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slapo_core import Primitive, Schedule, ScheduleError, get_logger
from slapo_tracing.nodes import own_forward, wrap_forward

from .communication.batch_norm_statistics import FORWARDS, ReplicaStatistics, replicas_of, statistics_of


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
        layers = [part for part in schedule.mod.modules() if _has_batch_norm_forward(part)]
        others = [path for path, part in schedule.mod.named_modules() if _has_other_forward(part)]
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
    return type(module).forward in FORWARDS and own_forward(module) is None


def _has_other_forward(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not _has_batch_norm_forward(module)
