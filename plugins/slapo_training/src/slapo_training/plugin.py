"""Hook implementations of slapo-training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import hookimpl

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from slapo_core import Schedule


@hookimpl
def slapo_queries() -> dict[str, str]:
    return {"full_state": "slapo_training.distributed.full_tensors:full_state"}


@hookimpl
def slapo_default_mesh(schedule: Schedule, target: str, group: dist.ProcessGroup | None) -> DeviceMesh | None:
    from .distributed.default_mesh import default_mesh  # noqa: PLC0415  a registrar imports nothing heavy

    return default_mesh(schedule, target, group)
