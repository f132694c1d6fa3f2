"""The steps that the families have in common, in their order, and the base model that holds the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slapo_core import Schedule

from .configuration import Configuration
from .input_broadcast import broadcast_input
from .kernels import use_kernels
from .precision import convert_precision
from .recomputation import checkpointed_blocks, recompute
from .stages import cut_stages, stage_end_blocks


def schedule_blocks(sch: Schedule, config: Configuration, path: str) -> Schedule:
    """Take the steps of a model whose blocks are one list, at this path in the base model."""
    return schedule_lists(sch, config, [blocks_of(base_model(sch, config, path)[path])])


def schedule_lists(sch: Schedule, config: Configuration, lists: Sequence[Sequence[Schedule]]) -> Schedule:
    """Take the steps of a model whose blocks are these lists."""
    return take_steps(sch, config, checkpointed_blocks(sch, config, *lists), stage_end_blocks(sch, config, *lists))


def take_steps(
    sch: Schedule,
    config: Configuration,
    recomputed: Iterable[Schedule],
    stage_ends: Iterable[Schedule],
    parallelize: Callable[[], object] | None = None,
) -> Schedule:
    """Take the steps: kernels, tensor parallelism, recomputation, stages that end behind the given modules.

    The schedule is that of the whole model, head included. ``parallelize`` takes the place of ``tensor_parallel``.
    """
    convert_precision(sch, config)
    use_kernels(sch, config)
    if sch.world_size > 1 and config.tensor_parallel:
        options = {name: True for name in ("sequence_parallel", "parallel_loss") if getattr(config, name)}
        parallelize() if parallelize else sch.tensor_parallel(**options)
    broadcast_input(sch, config)
    recompute(config, recomputed)
    cut_stages(sch, config, stage_ends)
    return sch


def base_model(schedule: Schedule, config: Configuration, *lists: str) -> Schedule:
    """The schedule of the base model, which holds these lists of blocks.

    Raises:
        ScheduleError: there is none at the prefix, or, without a prefix, none or several in the model.
    """
    wanted = " and ".join(map(repr, lists))

    def has_lists(base: Schedule) -> bool:
        return all(path in base and len(base[path].mod._modules) for path in lists)

    found = [path for path, handle in schedule.named_schedules() if has_lists(handle)]
    if config.prefix is not None:
        if config.prefix in found:
            return schedule[config.prefix] if config.prefix else schedule
        where = f"there is no {wanted} in the model at prefix {config.prefix!r}"
        advice = f"give prefix={found[0]!r}" if found else f"a {type(schedule.mod).__name__} is not a model for this schedule"
        raise config.error(schedule, f"{where}; {advice}")
    if len(found) != 1:
        several = f"several modules have {wanted}: {', '.join(map(repr, found))}; give one of them as prefix"
        none = f"no module of the {type(schedule.mod).__name__} has {wanted}; give the key of its own family, or a prefix"
        raise config.error(schedule, several if found else none)
    return schedule[found[0]] if found[0] else schedule


def blocks_of(*lists: Schedule) -> list[Schedule]:
    """Return the blocks of some lists, in order."""
    return [each[name] for each in lists for name in each.mod._modules]
