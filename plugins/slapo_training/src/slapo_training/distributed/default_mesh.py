"""Default mesh of a schedule without one, for engines on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import Schedule, Step, agree_on_error, build_program, get_logger, is_sharded


def default_mesh(sch: Schedule, target: str, given: dist.ProcessGroup | None) -> DeviceMesh | None:
    """Return a mesh of all ranks; None if the dialect is not data parallel or the numbers do not fit. Collective.

    All ranks are tensor parallel if a parameter is sharded, a step communicates over the group, or a group was given; otherwise
    none is. Stages take as many of the other ranks as get equal numbers of stages. The remaining ranks are data parallel.

    Args:
        sch: Any handle of the schedule.
        target: Name of the dialect whose engine will run the model.
        given: Process group given to ``create_schedule``, or None.
    """
    group = sch.group
    assert group is not None
    with agree_on_error(None, group):
        if "data_parallel" not in sch.registry.get("dialect", target).capabilities:
            return None
        stages = len(build_program(sch).stages)
    uses_group = any(sch.registry.primitive(step.name).over_group for step in _all_steps(sch.journal.steps))
    split = uses_group or given is not None or any(map(is_sharded, sch.root_module.parameters()))
    world = sch.world_size
    tp = world if split else 1
    pp = math.gcd(stages, world // tp)
    if (stages > 1 and pp == 1) or dist.get_process_group_ranks(group) != [*range(world)]:
        return None
    dp = world // (pp * tp)
    if dist.get_rank() == 0:
        get_logger().warning("no mesh was given: the %d ranks are pp=%d, dp=%d, tp=%d", world, pp, dp, tp)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def _all_steps(steps: Iterable[Step]) -> Iterator[Step]:
    for step in steps:
        yield step
        yield from _all_steps(step.children)
