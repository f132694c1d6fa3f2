"""Import of DeepSpeed, its setup with the existing process group, and the groups that it asks for."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from slapo_core import BuildError, Program
from slapo_training.distributed import SingleProcessGroup
from slapo_training.engines import without_warnings

from . import _deepspeed_private

_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""Pattern of torch's deprecation warning for the collectives that ZeRO calls."""


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed for a type of device, and return the module.

    DeepSpeed chooses its accelerator at import, from ``DS_ACCELERATOR`` if that is set, and reads ``LOCAL_RANK``. This
    function sets ``LOCAL_RANK`` if it is unset, and on a CPU ``DS_ACCELERATOR`` too. On a CPU it disables DeepSpeed's
    shared-memory collective, which DeepSpeed would compile with g++.

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
    # Not inside the step: leaving catch_warnings would repeat all warnings of the user's model at every step.
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
    """Restorer of ``torch.nn.functional.linear``, which stage 3 of ZeRO replaces, when this process's last engine closes."""

    _users = 0
    _original: Any = None

    def __init__(self) -> None:
        if TorchLinear._users == 0:
            TorchLinear._original = functional.linear
        TorchLinear._users += 1

    def release(self) -> None:
        """Give up this engine's use; the last one restores torch's function."""
        TorchLinear._users -= 1
        if TorchLinear._users == 0:
            functional.linear = TorchLinear._original


def start(deepspeed: Any) -> SingleProcessGroup:
    """Initialize DeepSpeed with the existing process group, or with a new group of this process if there is none."""
    world = SingleProcessGroup()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    _deepspeed_private.forget_mpu()
    return world


class MeshGroups:
    """Process groups of a mesh without a pipeline, for ``mpu=`` of ``deepspeed.initialize``; ZeRO uses only the replicas."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._groups = {axis: _group(program, axis) for axis in ("dp", "tp")}

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups["dp"]

    def get_data_parallel_world_size(self) -> int:
        return self._program.axis_size("dp")

    def get_data_parallel_rank(self) -> int:
        return self._program.axis_rank("dp")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups["tp"]

    def get_model_parallel_world_size(self) -> int:
        return self._program.axis_size("tp")

    def get_model_parallel_rank(self) -> int:
        return self._program.axis_rank("tp")

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def _group(program: Program, axis: str) -> dist.ProcessGroup:
    """Return the mesh's group along an axis; if the mesh lacks the axis, make groups of one rank each. Collective."""
    assert program.mesh is not None
    if axis in (program.mesh.mesh_dim_names or ()):
        group: dist.ProcessGroup = program.mesh.get_group(axis)
        return group
    groups: list[dist.ProcessGroup] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
