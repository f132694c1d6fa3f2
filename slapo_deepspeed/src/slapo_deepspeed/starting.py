"""Importing DeepSpeed and handing it the process group that there is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError


def start(device_type: str) -> tuple[Any, bool]:
    """DeepSpeed, on the process group of this process; and whether one of this process alone was made, as there was none.

    DeepSpeed looks for its accelerator as it is imported, and takes the environment's ``DS_ACCELERATOR`` for it; it reads
    ``LOCAL_RANK``. Both are set here where they are not. On a CPU its own shared-memory collective, which it would compile with
    g++, is left out.

    Raises:
        BuildError: DeepSpeed was imported for another accelerator.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    local = torch.cuda.current_device() if device_type == "cuda" else dist.get_rank()
    os.environ.setdefault("LOCAL_RANK", str(local))
    with without_warnings():
        import deepspeed
        import deepspeed.ops
        from deepspeed.accelerator import get_accelerator
    found = get_accelerator().device_name()
    if found != device_type:
        raise BuildError(
            f"DeepSpeed was imported for {found!r}, and the schedule's mesh is of {device_type!r}; set "
            f"DS_ACCELERATOR={device_type} before anything imports deepspeed"
        )
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    return deepspeed, alone


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave out the warnings of what DeepSpeed imports as it starts, which its authors have to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
