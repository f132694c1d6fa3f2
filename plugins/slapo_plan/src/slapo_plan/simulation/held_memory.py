"""Peak of the memory that the ranks of a pipeline keep between actions, e.g. the activations of micro-batches in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slapo_training import PipelineAction

from .pipeline_run import Order


class HeldPeak(NamedTuple):
    """Largest memory of one rank in a step, beyond what it holds all the time.

    Args:
        nbytes: Bytes kept by earlier actions, and the working memory of the action of the peak.
        position: Index of that action in the rank's order; -1 if the rank has no actions.
        working: Bytes of the working memory in ``nbytes``; 0 if the peak is what is kept after the action.
        in_flight: Number of micro-batches of each stage that are kept at the peak.
        half_done: Number of those, by stage, whose backward for inputs has run.
    """

    nbytes: int
    position: int
    working: int
    in_flight: Mapping[int, int]
    half_done: Mapping[int, int]


def held_peaks(
    order: Order,
    kept: Mapping[int, int],
    working: Mapping[tuple[int, str], int] | None = None,
    freed_by_input_backward: Mapping[int, int] | None = None,
) -> dict[int, HeldPeak]:
    """Return the peak of each rank.

    Args:
        order: Actions of each rank.
        kept: Bytes that a forward of each stage leaves until the ``"B"`` or ``"W"`` of its micro-batch ends.
        working: Most bytes that an action needs at once beyond all that is kept before it, by stage and kind.
        freed_by_input_backward: Those of the bytes in ``kept`` that are free after ``"I"``; negative if it keeps more.
    """
    return {rank: _peak(row, kept, working or {}, freed_by_input_backward or {}) for rank, row in order.items()}


def _peak(
    row: Sequence[PipelineAction], kept: Mapping[int, int], working: Mapping[tuple[int, str], int], freed: Mapping[int, int]
) -> HeldPeak:
    held, in_flight, halves = 0, Counter[int](), Counter[int]()
    peak = HeldPeak(0, -1, 0, {}, {})
    for position, (kind, stage, _) in enumerate(row):
        bytes_kept, bytes_freed = kept.get(stage, 0), freed.get(stage, 0)
        needs = working.get((stage, kind), 0)
        if held + needs > peak.nbytes or position == 0:
            peak = HeldPeak(held + needs, position, needs, in_flight.copy(), halves.copy())
        if kind == "F":
            held += bytes_kept
            in_flight[stage] += 1
        elif kind == "I":
            held -= bytes_freed
            halves[stage] += 1
        else:
            held -= bytes_kept - (bytes_freed if kind == "W" else 0)
            in_flight[stage] -= 1
            halves[stage] -= kind == "W"
        if held > peak.nbytes:
            peak = HeldPeak(held, position, 0, in_flight.copy(), halves.copy())
    return peak
