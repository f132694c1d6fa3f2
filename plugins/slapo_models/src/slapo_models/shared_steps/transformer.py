"""The steps that the families have in common, and the blocks to which they apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule

from .configuration import Configuration
from .input_broadcast import broadcast_input
from .kernels import use_kernels


def schedule_blocks(sch: Schedule, config: Configuration, path: str) -> Schedule:
    """Take the steps of a model whose blocks are one list, at this path in the base model."""
    blocks = blocks_of(base_model(sch, config, path)[path])
    return take_steps(sch, config, checkpointed_blocks(sch, config, blocks), stage_end_blocks(sch, config, blocks))


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
    if sch.world_size > 1:
        parallelize() if parallelize else sch.tensor_parallel(sequence_parallel=config.sequence_parallel)
    broadcast_input(sch, config)
    for block in recomputed:
        block.checkpoint()
    for module in stage_ends:
        module.cut_pipeline_stage()
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


def checkpointed_blocks(schedule: Schedule, config: Configuration, blocks: Sequence[Schedule]) -> list[Schedule]:
    """Return the share of the blocks that ``ckpt_ratio`` asks for.

    Raises:
        ScheduleError: it is less than one block.
    """
    if not config.ckpt_ratio:
        return []
    total, count = len(blocks), round(config.ckpt_ratio * len(blocks))
    if not count:
        message = f"ckpt_ratio={config.ckpt_ratio} is none of {total} blocks; give 0, or at least {1 / total:.3g}"
        raise config.error(schedule, message)
    if config.checkpoint_method == "head":
        return [*blocks[:count]]
    return [block for index, block in enumerate(blocks) if (index + 1) * count // total > index * count // total]


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


def convert_precision(schedule: Schedule, config: Configuration) -> None:
    """Convert parameters and buffers in place, as ``model.half()`` does, before the first step.

    Raises:
        ScheduleError: the schedule has steps, which could not be undone then.
    """
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    if dtype is None:
        return
    if schedule.journal.steps:
        message = f"{'fp16' if config.fp16 else 'bf16'} converts the model, and its schedule has steps already"
        raise config.error(schedule, f"{message}; convert the model before create_schedule")
    for tensor in _floating_point_tensors(schedule.mod):
        tensor.data = tensor.data.to(dtype)


@contextmanager
def restored_on_error(module: nn.Module) -> Iterator[None]:
    """Restore the data of parameters and buffers if the block fails."""
    before = [(tensor, tensor.data) for tensor in _floating_point_tensors(module)]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            if tensor.dtype != data.dtype:
                tensor.data = data
        raise


def _floating_point_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_floating_point()]
