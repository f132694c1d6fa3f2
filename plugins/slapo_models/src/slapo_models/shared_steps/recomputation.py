"""``ckpt_ratio``, ``checkpoint_method`` and ``checkpoint``: the blocks that are recomputed, and what they keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slapo_core import Schedule

from .configuration import Configuration


def recompute(config: Configuration, blocks: Iterable[Schedule]) -> None:
    """Checkpoint blocks, under the policy that ``checkpoint`` is, if it is one."""
    options = {} if config.checkpoint is None or config.lists_blocks else {"policy": config.checkpoint}
    for block in blocks:
        block.checkpoint(**options)


def checkpointed_blocks(schedule: Schedule, config: Configuration, *lists: Sequence[Schedule]) -> list[Schedule]:
    """Return the blocks to recompute: those that ``checkpoint`` lists, or a share of each list; all of them for a policy alone.

    Raises:
        ScheduleError: the share is less than one block, or an entry of ``checkpoint`` is no block.
    """
    if config.lists_blocks:
        return _listed_blocks(schedule, config, [block for blocks in lists for block in blocks])
    ratio = config.ckpt_ratio or (1.0 if config.checkpoint is not None else 0.0)
    if ratio and not any(lists):
        advice = "give checkpoint= a list of paths of modules"
        raise config.error(schedule, f"no list of repeated blocks is found in the {type(schedule.mod).__name__}; {advice}")
    return [block for blocks in lists for block in _share(schedule, config, blocks, ratio)]


def _listed_blocks(schedule: Schedule, config: Configuration, blocks: Sequence[Schedule]) -> list[Schedule]:
    found: dict[int, Schedule] = {}
    for entry in config.checkpoint:
        if isinstance(entry, str):
            matched = schedule.select(entry)
        elif type(entry) is int and 0 <= entry < len(blocks):
            matched = [blocks[entry]]
        else:
            advice = f"give numbers of blocks from 0 to {len(blocks) - 1}, or paths" if blocks else "give paths of modules"
            raise config.error(schedule, f"checkpoint has {entry!r}; {advice}")
        found.update((id(handle.mod), handle) for handle in matched)
    return list(found.values())


def _share(schedule: Schedule, config: Configuration, blocks: Sequence[Schedule], ratio: float) -> list[Schedule]:
    if not ratio:
        return []
    total, count = len(blocks), round(ratio * len(blocks))
    if not count:
        message = f"ckpt_ratio={ratio} is none of {total} blocks; give 0, or at least {1 / total:.3g}"
        raise config.error(schedule, message)
    if config.checkpoint_method == "head":
        return [*blocks[:count]]
    return [block for index, block in enumerate(blocks) if (index + 1) * count // total > index * count // total]
