"""Search for the step that broke a model: the journal is taken again in parts on fresh copies.

A step may be right only together with others: a layer cut in two needs the sum behind it. So no single prefix tells; steps are
put together by the block they work on (``layers.3``, say), blocks are searched first, and within the one that is wrong the last
prefix that is right is found. The steps behind that are suspect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from slapo_core import Step

Right = Callable[[Sequence[int]], bool]
"""Function that says whether the model is right after the steps of these numbers, ascending."""


def steps_to_blame(steps: Sequence[Step], right: Right) -> tuple[list[int], list[int]]:
    """Numbers of the steps that make the model wrong together, and of those before them that leave it right.

    Args:
        steps: All, which are known to be wrong.
        right: Asked about ``log2`` of the blocks, and about the steps of one block.
    """
    blocks: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        blocks.setdefault(_block(step.path), []).append(number)
    above = [number for block in blocks if _is_above(block, blocks) for number in blocks[block]]
    groups = [numbers for block, numbers in blocks.items() if not _is_above(block, blocks)]
    groups.sort(key=lambda numbers: numbers[-1])
    base = above
    if above and not right(above):
        base = []
        if not groups or right(_together(base, groups)) or not (found := _alone_to_blame(above, groups, right)):
            groups = [above]
        else:
            groups = found
    low, high = 0, len(groups)  # right with the first `low` groups, wrong with the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        if right(_together(base, groups[:middle])):
            low = middle
        else:
            high = middle
    base = _together(base, groups[:low])
    last = groups[low]
    good = next((end for end in range(len(last) - 1, 0, -1) if right(_together(base, [last[:end]]))), 0)
    return last[good:], _together(base, [last[:good]])


def _alone_to_blame(above: list[int], groups: list[list[int]], right: Right) -> list[list[int]]:
    """Groups up to the one that is wrong, where what is above is right with the others, and may need one of them."""
    for end in range(1, len(groups) + 1):
        if not right(_together([], groups[:end])):
            return groups[:end] if right(_together(above, [*groups[: end - 1], *groups[end:]])) else []
    return []


def _block(path: str) -> str:
    """Path of the element of a list that a path lies in; what lies in none is a block of its own, by its first name."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", path)
    return found.group() if found else path


def _is_above(block: str, blocks: dict[str, list[int]]) -> bool:
    return any(other != block and (not block or other.startswith(f"{block}.")) for other in blocks)


def _together(base: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    return sorted({*base, *(number for group in groups for number in group)})
