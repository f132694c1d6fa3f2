"""Actions of all ranks together: in a step, or of those that write or read a checkpoint while other threads train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import BuildError, Program, gather_objects, raise_on_all_ranks

from ._torch_private import groups_known, job_timeout

T = TypeVar("T")


def run_on_all_ranks(action: Callable[[], T], program: Program) -> T:
    """Run what one rank can do alone, and go on only if no rank failed. Collective.

    Returns:
        The result of the action.

    Raises:
        Exception: what the action raised here.
        BuildError: it raised on another rank.
    """
    result: Any = None
    error = None
    try:
        result = action()
    except Exception as err:
        error = err
    raise_on_all_ranks(error, program.mesh)
    return result  # type: ignore[no-any-return]


def _identity(error: Exception) -> Exception:
    return error


@dataclass(frozen=True)
class Ranks:
    """Ranks of a program.

    Args:
        place: This one's, counted row-major over the mesh.
        size: How many they are.
        mesh: Theirs; None where they meet in ``group``.
        group: Their own, which no step uses.
        told: What is raised for an error of an action, by which all ranks hear of it.
    """

    index: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    wrap_error: Callable[[Exception], Exception] = _identity

    @classmethod
    def of(cls, program: Program) -> Ranks:
        """The ranks of a program, which meet in the groups that its steps use. Collective."""
        own = dist.get_rank() if dist.is_initialized() else 0
        everyone = gather_objects(own, program.mesh)
        return cls(everyone.index(own), len(everyone), program.mesh)

    def in_new_group(self) -> Ranks:
        """The same ranks in a new group, for a thread. Collective.

        Raises:
            BuildError: torch cannot make one of them.
        """
        if self.size == 1 or self.mesh is None:
            return Ranks(self.index, self.size)
        return Ranks(self.index, self.size, None, new_group([self.mesh.mesh.flatten().tolist()], self.mesh, "gloo"))

    def with_error_wrapper(self, wrap_error: Callable[[Exception], Exception]) -> Ranks:
        """The same ranks, with other words for what an action raises."""
        return replace(self, wrap_error=wrap_error)

    def gather(self, value: Any) -> list[Any]:
        """One value of every rank, by place. Collective."""
        return gather_objects(value, self.mesh, self.group)

    def run_on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Do what one rank can do alone, and go on only if all could. Collective.

        Returns:
            What it gave on every rank, by place.

        Raises:
            Exception: what is told of what the action raised here.
            BuildError: it raised on another rank.
        """
        value, error = None, None
        try:
            value = action()
        except Exception as err:
            error = self.wrap_error(err)
        found = self.gather((error is None, value))
        if not all(is_done for is_done, _ in found):
            raise_on_all_ranks(error, self.mesh, self.group)
        return [each for _, each in found]

    def run_on_first(self, action: Callable[[], Any]) -> Any:
        """Return the result of an action of the first rank alone. Collective; it raises as ``run_on_all_ranks`` does."""
        return self.run_on_all(action if self.index == 0 else lambda: None)[0]


def new_group(rows: Sequence[list[int]], mesh: DeviceMesh, backend: str | None = None) -> dist.ProcessGroup:
    """A process group for each row of a mesh's ranks, with the job's time limit; this rank's. Collective.

    Args:
        rows: The same on every rank.
        mesh: Theirs.
        backend: torch's of the default group where it is None.

    Raises:
        BuildError: on every rank: torch cannot make them.
    """
    if sum(map(len, rows)) == dist.get_world_size():
        found: list[dist.ProcessGroup] = [dist.new_group(row, job_timeout(), backend=backend) for row in rows]
        return found[[dist.get_rank() in row for row in rows].index(True)]
    # by themselves ranks name a group by how many each knows, which may differ, as where a tie's group leaves some out
    if len(set(gather_objects(groups_known(), mesh))) > 1:
        raise BuildError(
            "the mesh leaves out ranks, and those in it are in different numbers of process groups, so that torch cannot make "
            "one more; give a mesh of all ranks, or save with wait=True if that is for a save in the background"
        )
    own = next(row for row in rows if dist.get_rank() in row)
    alone: dist.ProcessGroup = dist.new_group(own, job_timeout(), backend=backend, use_local_synchronization=True)
    return alone


def stage_group(program: Program) -> dist.ProcessGroup | None:
    """Return the group of all replicas and tensor-parallel ranks of this stage; None for one rank. Collective at first."""
    mesh = program.mesh
    axes = [axis for axis in ("dp", "tp") if program.axis_size(axis) > 1]
    if mesh is None or not axes:
        return None
    if len(axes) == 1:
        alone: dist.ProcessGroup = mesh.get_group(axes[0])
        return alone
    replicas = mesh.get_group("dp")
    if (group := _stages.get(replicas)) is None:
        names = [*(mesh.mesh_dim_names or ())]
        by_stage = mesh.mesh.movedim([names.index(axis) for axis in axes], [-2, -1])
        group = _stages[replicas] = new_group(by_stage.reshape(-1, mesh[tuple(axes)].size()).tolist(), mesh)
    return group


_stages: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
