"""Importing DeepSpeed and handing it the process group that there is."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError
from slapo_training.own_world import OwnWorld
from slapo_training.quiet import without_warnings


def start(device_type: str) -> tuple[Any, OwnWorld]:
    """DeepSpeed, on the process group of this process, or one of this process alone where there is none.

    DeepSpeed looks for its accelerator as it is imported, and takes the environment's ``DS_ACCELERATOR`` for it; it reads
    ``LOCAL_RANK``. Both are set here where they are not. On a CPU its own shared-memory collective, which it would compile with
    g++, is left out.

    Raises:
        BuildError: DeepSpeed was imported for another accelerator.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    local = torch.cuda.current_device() if device_type == "cuda" else dist.get_rank() if dist.is_initialized() else 0
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
    world = OwnWorld()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    return deepspeed, world
