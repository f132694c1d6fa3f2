"""Process groups behind the methods that DeepSpeed calls."""

from __future__ import annotations

import torch.distributed as dist

from slapo_core import Program


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
