"""Batches of all ranks before a step: each rank cuts its own, and all go on only if these are of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from slapo_core import BuildError, Program, all_reduce, raise_on_all_ranks

from .batches.microbatches import Batch, fingerprint
from .label_weights import LabelWeights

__all__ = ["BatchFacts", "check_boundaries", "check_contents", "check_shapes", "content_slots"]

_NOTHING = -(2**40)


class BatchFacts(NamedTuple):
    """Numbers that are compared between ranks: of the shape of a batch, two of its labels, and its marks.

    Args:
        low: The smallest over this rank's micro-batches.
        high: The largest.
        inputs: A fingerprint of what the stages receive, which follows from the batch: equal in one replica.
    """

    low: list[int]
    high: list[int]
    inputs: int = 0


class Cut(NamedTuple):
    """A batch of this rank.

    Args:
        parts: Its micro-batches.
        counts: How many labels each has by all that may be its labels, see ``batches.label_counts``.
        kinds: Indices of the numbers among these of which one counts.
        shape: A number that is equal where names, shapes and types are, see ``batches.fingerprint``.
        content: One that is equal for equal values, see ``batches.content``.
        marks: Marks of each micro-batch, see ``FirstStep.marks``.
    """

    parts: list[Batch]
    counts: list[tuple[int, ...]]
    kinds: list[int]
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
    error, own = None, Cut([], [(0, 0)], [0], 0, 0, [0])
    try:
        own = cut()
    except Exception as err:
        error = err
    labels = _label_facts(own.counts, own.kinds)
    high = [own.shape, *labels[:2], max(own.marks)]
    low = [own.shape, -labels[2], labels[1], min(own.marks)]
    row = [error is not None, *high, *(-number for number in low), *content_slots(program, own.content, error is None)]
    found = all_reduce(torch.tensor(row, dtype=torch.int64, device=device), program.mesh, dist.ReduceOp.MAX).tolist()
    if found[0]:
        raise_on_all_ranks(error, program.mesh)
    high, low = found[1:5], [-number for number in found[5:9]]
    check_shapes(high[0], low[0])
    check_contents(found[9:])
    weights = _weights(program, device, own.counts, differs=high[1] != low[1], is_ambiguous=bool(high[2]))
    return own.parts, weights, high[3] != low[3]


def content_slots(program: Program, content: int, known: bool) -> list[int]:
    """Return for each replica the largest and, negated, the smallest of its ranks' numbers, as far as this rank knows.

    Ranks reduce these numbers to the largest of each. There are none where no ranks share a batch.

    Args:
        program: Its mesh says which ranks.
        content: A number of this rank that is equal in one replica, as that of its batch.
        known: Whether this rank has it.
    """
    if program.axis_size("pp") * program.axis_size("tp") == 1:
        return []
    slots = [_NOTHING] * (2 * program.axis_size("dp"))
    if known:
        own = 2 * program.axis_rank("dp")
        slots[own : own + 2] = content, -content
    return slots


def check_contents(slots: list[int]) -> None:
    """Raise ``BuildError`` where the ranks of one replica were given different batches, from the reduced slots."""
    if (replica := _differing(slots)) is not None:
        raise BuildError(
            f"the ranks of replica {replica} were given different batches; give all pipeline stages and tensor-parallel "
            "ranks of one replica the same rows in the same order, e.g. by one seed for their data loaders"
        )


def check_boundaries(slots: list[int]) -> None:
    """Raise ``BuildError`` where the ranks of one replica planned different stage boundaries, from the reduced slots."""
    if (replica := _differing(slots)) is not None:
        raise BuildError(
            f"the ranks of replica {replica} planned different stage boundaries; the model's code must not depend on the rank, "
            "and what is frozen has to be frozen in the whole model, on every rank"
        )


def _differing(slots: list[int]) -> int | None:
    """Return the first replica whose ranks have different numbers."""
    pairs = zip(slots[::2], slots[1::2], strict=True)
    return next((replica for replica, (high, low) in enumerate(pairs) if high != -low), None)


def check_shapes(high: int, low: int) -> None:
    """Raise ``BuildError`` where the largest and the smallest fingerprint of all ranks' batches differ."""
    if high != low:
        raise BuildError(
            "the ranks were given batches of different names, shapes or types, or some train while others evaluate; give "
            "each rank a batch of the same shape, and call the same method"
        )


def weigh(program: Program, device: torch.device, counts: list[tuple[int, ...]], kinds: list[int]) -> LabelWeights:
    """Return what micro-batches weigh that were counted anew. Collective.

    Args:
        program: Its mesh says which ranks.
        device: For what is sent.
        counts: As in ``Cut``; so are ``kinds``.
        kinds: Indices of the numbers of which one counts.
    """
    row = torch.tensor(_label_facts(counts, kinds), dtype=torch.int64, device=device)
    high, is_ambiguous, low = all_reduce(row, program.mesh, dist.ReduceOp.MAX).tolist()
    return _weights(program, device, counts, differs=high != -low, is_ambiguous=bool(is_ambiguous))


def _label_facts(counts: list[tuple[int, ...]], kinds: list[int]) -> list[int]:
    """Return the largest fingerprint of a micro-batch's numbers, 1 if the numbers of one differ, and minus the smallest one."""
    numbers = [[own[kind] for kind in kinds] for own in counts]
    prints = [fingerprint(each) for each in numbers]
    return [max(prints), int(any(len(set(each)) > 1 for each in numbers)), -min(prints)]


def _weights(
    program: Program, device: torch.device, counts: list[tuple[int, ...]], differs: bool, is_ambiguous: bool
) -> LabelWeights:
    sums, dp = [sum(each) for each in zip(*counts, strict=True)], program.axis_size("dp")
    if differs and dp > 1:
        assert program.mesh is not None
        totals = torch.tensor(sums, dtype=torch.int64, device=device)
        dist.all_reduce(totals, group=program.mesh.get_group("dp"))
        sums = [int(each) for each in totals.tolist()]
    return LabelWeights(counts, sums, len(counts) * dp, differs, is_ambiguous)
