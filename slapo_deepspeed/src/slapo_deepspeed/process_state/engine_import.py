"""Importing DeepSpeed and handing it the process group that there is."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from slapo_core import BuildError, Program, gather_objects
from slapo_training.distributed import SingleProcessGroup
from slapo_training.engines import without_warnings

from . import _deepspeed_private

_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""What torch says of the collectives that ZeRO calls."""


def imported(device_type: str) -> Any:
    """DeepSpeed for this type of device.

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
        from deepspeed.accelerator import get_accelerator
    # not within the step: leaving catch_warnings would show all warnings of the user's model again, every step
    warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)
    found = get_accelerator().device_name()
    if found != device_type:
        raise BuildError(
            f"DeepSpeed was imported for {found!r}, and the schedule's mesh is of {device_type!r}; set "
            f"DS_ACCELERATOR={device_type} before anything imports deepspeed"
        )
    if device_type == "cpu":
        _deepspeed_private.disable_shared_memory_collective()
    return deepspeed


class TorchLinear:
    """Puts ``torch.nn.functional.linear`` back with the last engine of this process: stage 3 of ZeRO leaves its own there."""

    _users = 0
    _original: Any = None

    def __init__(self) -> None:
        if TorchLinear._users == 0:
            TorchLinear._original = functional.linear
        TorchLinear._users += 1

    def leave(self) -> None:
        """This engine needs DeepSpeed's no more."""
        TorchLinear._users -= 1
        if TorchLinear._users == 0:
            functional.linear = TorchLinear._original


def start(deepspeed: Any) -> SingleProcessGroup:
    """Hand DeepSpeed the process group of this process, or one of this process alone where there is none."""
    world = SingleProcessGroup()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    _deepspeed_private.forget_mpu()
    return world


def number_alike(program: Program) -> None:
    """Have all ranks number the parameters and modules of stage 3 from the same numbers on. Collective over the mesh.

    DeepSpeed compares these numbers between ranks in a forward. Where they differ, some ranks fail while others wait. A
    process that has had more engines than another one counts from higher numbers.
    """
    _deepspeed_private.align_numbers(lambda own: gather_objects(own, program.mesh))
