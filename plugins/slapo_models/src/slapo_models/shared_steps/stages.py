"""``pipeline_cuts`` and ``pipeline_stages``: the modules behind which a stage ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slapo_core import Schedule

from .configuration import Configuration


def stage_end_blocks(schedule: Schedule, config: Configuration, *lists: Sequence[Schedule | None]) -> list[Schedule]:
    """Return the blocks after which ``pipeline_cuts`` ends a stage.

    Args:
        config: ``pipeline_cuts`` are numbers of blocks where there is one list, and a list of them for each of several.
        *lists: The blocks by number; None where no stage can end.

    Raises:
        ScheduleError: what is given has another form, or no stage can end there.
    """
    if not config.pipeline_cuts:
        return []
    per_list = [config.pipeline_cuts] if len(lists) == 1 else [*config.pipeline_cuts]
    if len(per_list) != len(lists) or not all(isinstance(cuts, Sequence) and not isinstance(cuts, str) for cuts in per_list):
        message = f"pipeline_cuts is {config.pipeline_cuts!r}; give {len(lists)} lists of numbers, one for each list of blocks"
        raise config.error(schedule, message)
    return [block for cuts, blocks in zip(per_list, lists, strict=True) for block in _select(schedule, config, [*cuts], blocks)]


def _select(schedule: Schedule, config: Configuration, cuts: list[Any], blocks: Sequence[Schedule | None]) -> list[Schedule]:
    possible = [number for number, block in enumerate(blocks) if block is not None]
    found = []
    for cut in cuts:
        block = blocks[cut] if type(cut) is int and 0 <= cut < len(blocks) else None
        if block is None:
            advice = f"give numbers of blocks out of {', '.join(map(str, possible))}"
            raise config.error(schedule, f"pipeline_cuts has {cut!r}, and no stage can end there; {advice}")
        found.append(block)
    if cuts != sorted(set(cuts)):
        raise config.error(schedule, f"pipeline_cuts has {cuts!r}; give each number once, in rising order")
    return found


def cut_stages(schedule: Schedule, config: Configuration, stage_ends: Iterable[Schedule]) -> None:
    """End stages behind the given modules; without any, make ``pipeline_stages``, or one for each rank along ``pp``."""
    ends = list(stage_ends)
    for module in ends:
        module.cut_pipeline_stage()
    if ends or config.pipeline_cuts:
        return
    stages = config.pipeline_stages
    if isinstance(stages, Sequence):
        schedule.pipeline(boundaries=list(stages))
    elif (number := _pipeline_ranks(schedule) if stages is None else stages) > 1:
        schedule.pipeline(number)


def _pipeline_ranks(schedule: Schedule) -> int:
    names = (schedule.mesh.mesh_dim_names or ()) if schedule.mesh is not None else ()
    return schedule.mesh.size(names.index("pp")) if schedule.mesh is not None and "pp" in names else 1
