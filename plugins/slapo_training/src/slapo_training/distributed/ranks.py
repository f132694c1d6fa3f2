"""Actions of all ranks together, in a step or in a thread that writes a checkpoint; process groups and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import BuildError, Program, agree_on_error, gather_objects, mesh_groups, raise_on_all_ranks

from ._torch_private import groups_known, job_timeout


@contextmanager
def synchronized_rng(groups: Iterable[dist.ProcessGroup], device: str) -> Iterator[None]:
    """Context in which all ranks use the first rank's random numbers. Collective over each group in turn.

    Afterwards, ranks that had the first rank's random state keep its new state; other ranks restore their old state.
    """
    own = _state(device)
    first = own.clone()
    for group in groups:
        dist.broadcast(first, group=group, group_src=0)
    is_same = torch.equal(own, first)
    if not is_same:
        _set_state(first, device)
    try:
        yield
    finally:
        if not is_same:
            _set_state(own, device)


def _state(device: str) -> torch.Tensor:
    states = [torch.get_rng_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states).to(device)


def _set_state(state: torch.Tensor, device: str) -> None:
    size = torch.get_rng_state().numel()
    state = state.cpu()
    torch.set_rng_state(state[:size])
    if device == "cuda":
        torch.cuda.set_rng_state(state[size:])


class SingleProcessGroup:
    """Default process group of this process alone; made if there is none, and released by its last engine.

    Attributes:
        is_ours: True if this class made the default group and this engine uses it.
    """

    _users = 0

    def __init__(self) -> None:
        self.is_ours = not dist.is_initialized() or SingleProcessGroup._users > 0
        if not dist.is_initialized():
            SingleProcessGroup._users = 0
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        SingleProcessGroup._users += self.is_ours

    def close(self, destroy: Callable[[], None] = dist.destroy_process_group) -> None:
        """Release the group for this engine, and destroy it if no other engine uses it.

        Args:
            destroy: Destroys the default process group.
        """
        if not self.is_ours:
            return
        self.is_ours = False
        SingleProcessGroup._users -= 1
        if SingleProcessGroup._users == 0 and dist.is_initialized():
            destroy()


T = TypeVar("T")


def run_on_all_ranks(action: Callable[[], T], program: Program) -> T:
    """Run an action that sends no message; return its result only if no rank failed. Collective.

    Raises:
        Exception: the action's error on this rank.
        BuildError: the action failed on another rank.
    """
    with agree_on_error(program.mesh):
        result = action()
    return result


def all_reduce(values: torch.Tensor, mesh: DeviceMesh | None, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """All-reduce a tensor in place over every rank of the mesh, and return it. Every rank gets the same bits. Collective.

    Args:
        values: Any shape, the same on every rank.
        mesh: None leaves the tensor as it is.
        op: Reduction of ``torch.distributed``.

    Example:
        >>> all_reduce(torch.ones(2), mesh=None)
        tensor([1., 1.])
    """
    for group in mesh_groups(mesh):
        dist.all_reduce(values, op=op, group=group)
    return values


def reduce_over_replicas(values: torch.Tensor, program: Program, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """All-reduce a tensor in place over the data-parallel ranks, and return it. Collective over them."""
    if program.mesh is not None and program.axis_size("dp") > 1:
        dist.all_reduce(values, op, group=program.mesh.get_group("dp"))
    return values


@dataclass(frozen=True)
class Ranks:
    """Ranks of a program.

    Args:
        index: Index of this rank, row-major over the mesh.
        mesh: Mesh of the ranks; None if they communicate in ``group``.
        group: A process group that no step uses.
        wrap_error: Converts the error of an action.
    """

    index: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    wrap_error: Callable[[Exception], Exception] = lambda error: error

    @classmethod
    def of(cls, program: Program) -> Ranks:
        """Return the ranks of a program, which communicate in the groups of its steps. Collective."""
        own = dist.get_rank() if dist.is_initialized() else 0
        everyone = gather_objects(own, program.mesh)
        return cls(everyone.index(own), len(everyone), program.mesh)

    def in_new_group(self) -> Ranks:
        """Return the same ranks with a new process group, for a thread. Collective.

        Raises:
            BuildError: torch cannot make the group.
        """
        if self.size == 1 or self.mesh is None:
            return Ranks(self.index, self.size)
        return Ranks(self.index, self.size, None, new_group([self.mesh.mesh.flatten().tolist()], self.mesh, "gloo"))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks by index. Collective."""
        return gather_objects(value, self.mesh, self.group)

    def run_on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action that sends no message; return the results of all ranks by index only if no rank failed. Collective.

        Raises:
            Exception: the action's error on this rank, converted by ``wrap_error``.
            BuildError: the action failed on another rank.
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
        """Run an action on the first rank only; return its result on all ranks. Raises as ``run_on_all``. Collective."""
        return self.run_on_all(action if self.index == 0 else lambda: None)[0]


def new_group(rows: Sequence[list[int]], mesh: DeviceMesh, backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group for each row of a mesh's global ranks, with the job's timeout; return this rank's. Collective.

    Raises:
        BuildError: on every rank: torch cannot make the groups.
    """
    if sum(map(len, rows)) == dist.get_world_size():
        found: list[dist.ProcessGroup] = [dist.new_group(row, job_timeout(), backend=backend) for row in rows]
        return found[[dist.get_rank() in row for row in rows].index(True)]
    # ranks name a group by their number of groups, which may differ, e.g. if a tie's group excludes some ranks
    if len(set(gather_objects(groups_known(), mesh))) > 1:
        raise BuildError(
            "the mesh leaves out ranks, and those in it are in different numbers of process groups, so that torch cannot make "
            "one more; give a mesh of all ranks, or save with wait=True if that is for a save in the background"
        )
    own = next(row for row in rows if dist.get_rank() in row)
    alone: dist.ProcessGroup = dist.new_group(own, job_timeout(), backend=backend, use_local_synchronization=True)
    return alone


def stage_group(program: Program) -> dist.ProcessGroup | None:
    """Return the group of this stage's replicas and tensor-parallel ranks; None for one rank. The first call is collective."""
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
