"""Import of Megatron-Core, and its ``parallel_state`` for the mesh of a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from slapo_core import BuildError, Program
from slapo_training.distributed import SingleProcessGroup, run_on_all_ranks
from slapo_training.engines import open_engines, without_warnings

_AXES = {"tp": "get_tensor_model_parallel_group", "pp": "get_pipeline_model_parallel_group", "dp": "get_data_parallel_group"}


class ParallelState:
    """Megatron's process groups for a program: the ones that the user set up, or new ones. The constructor is collective.

    The mesh has all ranks, row-major over pp, dp, tp. A rank has ``chunks`` stages.

    Attributes:
        is_ours: True if an engine made the groups, not the user.

    Raises:
        BuildError: ``parallel_state`` was set up for another layout.
    """

    _users = 0
    _world_of_users: Any = None

    def __init__(self, program: Program, chunks: int, timeout_minutes: int) -> None:
        self._world, self._made = SingleProcessGroup(), list[Any]()
        try:
            self._find(program, chunks, timeout_minutes)
        except BaseException:
            self._world.close()
            raise

    def _find(self, program: Program, chunks: int, timeout_minutes: int) -> None:
        with without_warnings():
            from megatron.core import parallel_state
            from megatron.core.process_groups_config import ProcessGroupCollection
        self._state = parallel_state
        is_new = not parallel_state.model_parallel_is_initialized()
        ParallelState._users = 0 if is_new else ParallelState._users
        self.is_ours = is_new or ParallelState._users > 0
        if is_new:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=program.axis_size("tp"),
                pipeline_model_parallel_size=program.axis_size("pp"),
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=timeout_minutes,
            )
        else:
            run_on_all_ranks(lambda: self._check_found(program, chunks), program)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        ParallelState._users += self.is_ours
        ParallelState._world_of_users = dist.group.WORLD
        if self.is_ours:
            open_engines.add_group_holder(ParallelState)

    @classmethod
    def abandon(cls) -> None:
        """Forget Megatron's groups if their default process group was destroyed before the engine was closed."""
        from megatron.core import parallel_state

        if cls._users and cls._world_of_users is not dist.group.WORLD:
            parallel_state.destroy_model_parallel()
        cls._users, cls._world_of_users = 0, None

    def _check_found(self, program: Program, chunks: int) -> None:
        try:
            self._check(program, chunks)
        except BuildError as err:
            if not self.is_ours:
                raise
            raise BuildError(
                "an engine of target 'megatron' for another mesh or other stages is still open in this process, and megatron's "
                "parallel_state is one for all; call its engine.close() first"
            ) from err

    def _check(self, program: Program, chunks: int) -> None:
        """Refuse existing groups that differ from the mesh's."""
        for axis, getter in _AXES.items():
            if dist.get_process_group_ranks(getattr(self._state, getter)()) != _ranks(program, axis):
                raise BuildError(
                    f"megatron's parallel_state is set up with other groups along {axis} than the schedule's mesh; call "
                    "initialize_model_parallel for the mesh, or leave it to build"
                )
        for name in ("context", "expert_model"):
            if (size := getattr(self._state, f"get_{name}_parallel_world_size")()) != 1:
                raise BuildError(
                    f"megatron's parallel_state is set up with {size} ranks for {name}_parallel, which no schedule has; use 1"
                )
        if dist.get_world_size(self._state.get_intra_distributed_optimizer_instance_group()) != dist.get_world_size():
            raise BuildError("megatron's parallel_state has several instances of the distributed optimizer; use one")
        virtual = self._state.get_virtual_pipeline_model_parallel_world_size() or 1
        if chunks > 1 and virtual != chunks:
            raise BuildError(
                f"megatron's parallel_state is set up with {virtual} virtual stages on a rank, and the schedule has {chunks}; "
                "cut as many, or leave it to build"
            )

    def group(self, ranks: list[int]) -> Any:
        """Make a process group for this engine; outside of ``ranks``, return torch's placeholder. Collective."""
        self._made.append(dist.new_group(ranks))
        return self._made[-1]

    def close(self) -> None:
        """Destroy this engine's groups, and Megatron's groups with the last engine that uses them. Collective."""
        destroy(self._made)
        own = [getattr(self.groups, field.name, None) for field in fields(self.groups)]
        if self.forget():
            destroy(own)
        del own
        self._world.close()

    def forget(self) -> bool:
        """Drop all references to groups, whose threads end with the last reference.

        Return True if engines made Megatron's groups and this was the last engine that used them.
        """
        self._made.clear()
        was_ours, self.is_ours = self.is_ours, False
        ParallelState._users = max(ParallelState._users - was_ours, 0)
        is_last = was_ours and ParallelState._users == 0
        if is_last and self.groups.pp is self._state.get_pipeline_model_parallel_group(check_initialized=False):
            self._state.destroy_model_parallel()  # this does not end their threads
        for field in fields(self.groups):
            setattr(self.groups, field.name, None)
        return is_last


def destroy(groups: Iterable[Any]) -> None:
    """Destroy process groups, which frees their threads and sockets; objects that are not this rank's groups are ignored."""
    found = {id(group): group for group in groups if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD}
    for group in found.values():
        dist.destroy_process_group(group)


def device_of(program: Program) -> str:
    """Return the type of the device that a program runs on: the mesh's, or without a mesh the parameters'."""
    if program.mesh is not None:
        return program.mesh.device_type
    return next((parameter.device.type for parameter in program.module.parameters()), "cpu")


def config_of(kind: Any, given: dict[str, Any]) -> Any:
    """Make one of Megatron's configurations, which check their arguments.

    Raises:
        BuildError: Megatron refuses the arguments.
    """
    try:
        return kind(**given)
    except (TypeError, ValueError, AssertionError) as err:
        raise BuildError(f"{kind.__name__} of megatron-core does not take this: {err}") from err


def _ranks(program: Program, axis: str) -> list[int]:
    mesh = program.mesh
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return [dist.get_rank()]
    return dist.get_process_group_ranks(mesh.get_group(axis))
