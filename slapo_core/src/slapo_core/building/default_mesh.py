"""The mesh of a schedule that was given none, for an engine on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed.agreement import raise_on_all_ranks
from ..interfaces.program import Program
from ..modules.parameters import is_sharded
from ..reporting.logger import get_logger
from ..schedules.journal import Step
from ..schedules.schedule import Schedule


@contextmanager
def with_mesh(sch: Schedule, target: str, make_program: Callable[[Schedule], Program]) -> Iterator[None]:
    """Give a schedule without a mesh one of all ranks in the block, which it keeps where the block succeeds. Collective.

    All ranks are tensor parallel where something is split, a step communicates over the group, or a group was given; else none.
    The stages go to as many of the others as can have the same number of them; what is left is data parallel. Where these
    numbers do not fit, and for a group of some ranks, there is no mesh, and what needs one says so. Nor is there one for a
    dialect that is not data parallel.

    Args:
        sch: Any handle of the schedule.
        target: Name of the dialect.
        make_program: Makes the program, for the number of stages.
    """
    root = sch._root
    if root.mesh is not None or not dist.is_initialized() or sch.world_size < dist.get_world_size() or sch.world_size == 1:
        yield
        return
    root.mesh = _mesh(sch, target, make_program)
    try:
        yield
    except BaseException:
        root.mesh = None
        vars(root).pop("mesh_group", None)
        raise


def _mesh(sch: Schedule, target: str, make_program: Callable[[Schedule], Program]) -> DeviceMesh | None:
    root, group, stages, error = sch._root, sch.group, 1, None
    assert group is not None
    try:
        if "data_parallel" not in root.registry.dialect(target).capabilities:
            return None
        stages = len(make_program(sch).stages)
    except Exception as err:
        error = err
    raise_on_all_ranks(error, None, group)
    uses_group = any(root.registry.primitive(step.name).over_group for step in _all(root.journal.steps))
    split = uses_group or any(map(is_sharded, root.module.parameters()))
    world = sch.world_size
    tp = world if split or root.group is not None else 1
    pp = math.gcd(stages, world // tp)
    if (stages > 1 and pp == 1) or dist.get_process_group_ranks(group) != [*range(world)]:
        return None
    dp = world // (pp * tp)
    if dist.get_rank() == 0:
        get_logger().warning("no mesh was given: the %d ranks are pp=%d, dp=%d, tp=%d", world, pp, dp, tp)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def _all(steps: Iterable[Step]) -> Iterator[Step]:
    for step in steps:
        yield step
        yield from _all(step.children)
