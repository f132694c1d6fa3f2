"""Contents of a pipeline rank while each of its actions runs: the states that can be its peak."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from slapo_training import PipelineAction


class State(NamedTuple):
    """State of a rank at the start of an action; its stages are numbered from 0.

    Args:
        kind: Kind of the action, as of ``PipelineAction``.
        stage: Its stage.
        is_first: True if it is the first backward of its stage in the step, which allocates gradients.
        kept: Number of micro-batches of each stage whose forward has run and whose backward has not begun.
        half: Number of micro-batches of each stage whose backward for inputs has run, and that for weights has not.
        begun: True for each stage that has gradients.
    """

    kind: str
    stage: int
    is_first: bool
    kept: tuple[int, ...]
    half: tuple[int, ...]
    begun: tuple[bool, ...]

    def covers(self, other: State) -> bool:
        """Return True if everything that exists in another state before the same action exists in this one."""
        for index, kept in enumerate(self.kept):
            theirs = other.kept[index]
            if kept < theirs or kept + self.half[index] < theirs + other.half[index] or self.begun[index] < other.begun[index]:
                return False
        return True


def largest_states(order: Sequence[PipelineAction]) -> list[State]:
    """Return the states of a rank that no other state covers.

    Args:
        order: Actions of the rank.
    """
    numbers = {stage: index for index, stage in enumerate(sorted({action.stage for action in order}))}
    kept, half, begun = ([0] * len(numbers) for _ in range(3))
    found: dict[State, None] = {}
    for kind, stage, _ in order:
        index = numbers[stage]
        is_first = kind in "BW" and not begun[index]
        found[State(kind, index, is_first, tuple(kept), tuple(half), tuple(map(bool, begun)))] = None
        if kind == "F":
            kept[index] += 1
        elif kind == "W":
            half[index] -= 1
        else:
            kept[index] -= 1
            half[index] += kind == "I"
        begun[index] |= is_first
    largest: dict[tuple[str, int, bool], list[State]] = {}
    for state in found:
        alike = largest.setdefault(state[:3], [])
        if not any(other.covers(state) for other in alike):
            alike[:] = [*(other for other in alike if not state.covers(other)), state]
    return [*chain.from_iterable(largest.values())]
