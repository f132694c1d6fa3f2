"""Bisection for the step that broke a model: parts of the journal are replayed on copies.

A step may be right only together with others: a split layer needs the all-reduce after it. Therefore no single prefix decides.
Steps are grouped by the block they act on, e.g. ``layers.3``. Blocks are bisected first. Within the wrong block, the last right
prefix is found, and the steps after it are suspect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from slapo_core import Step

IsCorrect = Callable[[Sequence[int]], bool]
"""Function that returns True if the model is right after the steps with these numbers, ascending."""


def steps_to_blame(steps: Sequence[Step], right: IsCorrect) -> tuple[list[int], list[int]]:
    """Return the numbers of the steps that make the model wrong together, and those of the steps before that leave it right.

    All steps are known to be wrong together. ``right`` is called for ``log2`` of the blocks, and for the steps of one block.
    """
    blocks: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        blocks.setdefault(_block(step.path), []).append(number)
    above = [number for block in blocks if _contains_block(block, blocks) for number in blocks[block]]
    groups = [numbers for block, numbers in blocks.items() if not _contains_block(block, blocks)]
    groups.sort(key=lambda numbers: numbers[-1])
    base = above
    if above and not right(above):
        base = []
        if not groups or right(_join_groups(base, groups)) or not (found := _groups_before_fault(above, groups, right)):
            groups = [above]
        else:
            groups = found
    low, high = 0, len(groups)  # right with the first `low` groups, wrong with the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        if right(_join_groups(base, groups[:middle])):
            low = middle
        else:
            high = middle
    base = _join_groups(base, groups[:low])
    last = groups[low]
    good = next((end for end in range(len(last) - 1, 0, -1) if right(_join_groups(base, [last[:end]]))), 0)
    return last[good:], _join_groups(base, [last[:good]])


def _groups_before_fault(above: list[int], groups: list[list[int]], right: IsCorrect) -> list[list[int]]:
    """Return the groups up to the wrong one, where the steps above are right with the others, and may need one of them."""
    for end in range(1, len(groups) + 1):
        if not right(_join_groups([], groups[:end])):
            return groups[:end] if right(_join_groups(above, [*groups[: end - 1], *groups[end:]])) else []
    return []


def _block(path: str) -> str:
    """Return the path of the list element that contains ``path``; outside of lists, the path itself."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", path)
    return found.group() if found else path


def _contains_block(block: str, blocks: dict[str, list[int]]) -> bool:
    return any(other != block and (not block or other.startswith(f"{block}.")) for other in blocks)


def _join_groups(base: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    return sorted({*base, *(number for group in groups for number in group)})
