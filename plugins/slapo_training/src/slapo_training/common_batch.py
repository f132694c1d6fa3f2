"""Before a step: every rank cuts its batch, and all go on only if these are batches of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from slapo_core.agreement import agree, all_reduce
from slapo_core.program import Program

from .batches import Batch
from .label_weights import LabelWeights
from .meeting import check_contents, check_shapes, content_slots


class Cut(NamedTuple):
    """A batch of this rank.

    Args:
        parts: Its micro-batches.
        counts: How many labels each has, see ``batches.labels_of``.
        shape: A number that is equal where names, shapes and types are, see ``batches.fingerprint``.
        content: One that is equal for equal values, see ``batches.content``.
        marks: Marks of each micro-batch, see ``FirstStep.marks``.
    """

    parts: list[Batch]
    counts: list[tuple[int, int]]
    shape: int
    content: int
    marks: list[int]


def cut_together(program: Program, device: torch.device, cut: Callable[[], Cut]) -> tuple[list[Batch], LabelWeights, bool]:
    """Cut this rank's batch, and compare it with those of the other ranks. Collective.

    One small reduction where all is well and micro-batches have as many labels each, two where they differ.

    Args:
        program: Its mesh says which ranks.
        device: For what is sent.
        cut: What one rank can do alone.

    Returns:
        The micro-batches, what they weigh, and whether marks differ.

    Raises:
        Exception: what ``cut`` raised here.
        BuildError: it raised on another rank; or ranks were given batches of different shapes, or those of one replica
            different ones.
    """
    error, own = None, Cut([], [(0, 0)], 0, 0, [0])
    try:
        own = cut()
    except Exception as err:
        error = err
    high = [own.shape, *(max(counts) for counts in zip(*own.counts, strict=True)), max(own.marks)]
    low = [own.shape, *(min(counts) for counts in zip(*own.counts, strict=True)), min(own.marks)]
    row = [error is not None, *high, *(-number for number in low), *content_slots(program, own.content, error is None)]
    found = all_reduce(torch.tensor(row, dtype=torch.int64, device=device), program.mesh, dist.ReduceOp.MAX).tolist()
    if found[0]:
        agree(error, program.mesh)
    high, low = found[1:5], [-number for number in found[5:9]]
    check_shapes(high[0], low[0])
    check_contents(found[9:])
    return own.parts, _weights(program, device, own, differs=high[1:3] != low[1:3]), high[3] != low[3]


def _weights(program: Program, device: torch.device, own: Cut, differs: bool) -> LabelWeights:
    sums = (sum(whole for whole, _ in own.counts), sum(rest for _, rest in own.counts))
    dp = program.axis_size("dp")
    if differs and dp > 1:
        assert program.mesh is not None
        totals = torch.tensor(sums, dtype=torch.int64, device=device)
        dist.all_reduce(totals, group=program.mesh.get_group("dp"))
        sums = (int(totals[0]), int(totals[1]))
    return LabelWeights(own.counts, sums, len(own.parts) * dp, differs)
