"""A process group of any number of ranks in one process, for estimates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import ScheduleError

from ._torch_private import fake_store


@contextmanager
def fake_ranks(*, pp: int = 1, dp: int = 1, tp: int = 1, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Make this process rank 0 of a job whose other ranks do not exist; nothing is sent.

    A schedule on the mesh can be estimated, not trained.

    Args:
        pp: Number of pipeline ranks.
        dp: Number of replicas.
        tp: Number of tensor-parallel ranks.
        device_type: Device of the ranks.

    Yields:
        The mesh with axes ``pp``, ``dp`` and ``tp``.

    Raises:
        ScheduleError: a process group exists already.

    Example:
        >>> with fake_ranks(pp=16, dp=128, tp=8) as mesh:
        ...     mesh.size()
        16384
    """
    if dist.is_initialized():
        what = (
            f"a process group of {dist.get_world_size()} ranks exists already; destroy it, or estimate in a process of its own"
        )
        raise ScheduleError(what, primitive="fake_ranks")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=pp * dp * tp)
    try:
        yield init_device_mesh(device_type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    finally:
        dist.destroy_process_group()
