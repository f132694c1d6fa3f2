"""Comparison of the batches of all ranks before a step: each rank splits its own, and all must be of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from slapo_core import BuildError, Program, raise_on_all_ranks

from .batches.microbatches import Batch, fingerprint
from .distributed.ranks import all_reduce, reduce_over_replicas
from .label_weights import LabelWeights

__all__ = ["BatchFingerprints", "check_boundaries", "check_contents", "check_shapes", "replica_extremes"]

_NOTHING = -(2**40)


class BatchFingerprints(NamedTuple):
    """Numbers that ranks compare: a fingerprint of the batch's shape, two label counts, and a fingerprint of row counts.

    ``low`` and ``high`` are the extremes over this rank's micro-batches. ``inputs`` is the fingerprint of the stages' inputs,
    which must be equal in one replica.
    """

    low: list[int]
    high: list[int]
    inputs: int = 0


class Cut(NamedTuple):
    """Split batch of this rank.

    Args:
        counts: Label counts of each micro-batch by each candidate, see ``label_counts``.
        kinds: Indices of the candidates that may be the labels of the loss.
        shape: Fingerprint of names, shapes and dtypes.
        content: Fingerprint of values, see ``content_fingerprint``.
        marks: Fingerprint of each micro-batch's row counts, see ``FirstStep.marks``.
    """

    parts: list[Batch]
    counts: list[tuple[int, ...]]
    kinds: list[int]
    shape: int
    content: int
    marks: list[int]


def cut_together(program: Program, device: torch.device, cut: Callable[[], Cut]) -> tuple[list[Batch], LabelWeights, bool]:
    """Split this rank's batch by ``cut``, which sends nothing, and compare it with the other ranks' batches. Collective.

    Without an error there is one small reduction; two if micro-batches have different numbers of labels.

    Returns:
        The micro-batches, their weights, and whether marks differ.

    Raises:
        Exception: the error of ``cut`` on this rank.
        BuildError: ``cut`` failed on another rank; batches differ in shape; or ranks of one replica have different batches.
    """
    error, own = None, Cut([], [(0, 0)], [0], 0, 0, [0])
    try:
        own = cut()
    except Exception as err:
        error = err
    labels = _label_fingerprints(own.counts, own.kinds)
    high = [own.shape, *labels[:2], max(own.marks)]
    low = [own.shape, -labels[2], labels[1], min(own.marks)]
    row = [error is not None, *high, *(-number for number in low), *replica_extremes(program, own.content, error is None)]
    found = all_reduce(torch.tensor(row, dtype=torch.int64, device=device), program.mesh, dist.ReduceOp.MAX).tolist()
    if found[0]:
        raise_on_all_ranks(error, program.mesh)
    high, low = found[1:5], [-number for number in found[5:9]]
    check_shapes(high[0], low[0])
    check_contents(found[9:])
    weights = _weights(program, device, own.counts, differs=high[1] != low[1], is_ambiguous=bool(high[2]))
    return own.parts, weights, high[3] != low[3]


def replica_extremes(program: Program, content: int, known: bool) -> list[int]:
    """Return slots for the largest and the negated smallest number of each replica, filled with this rank's number.

    A reduction by maximum fills all slots. Without ranks that share a batch there are no slots.

    Args:
        content: Number of this rank that must be equal in its replica, e.g. a fingerprint of its batch.
        known: False if this rank has no number.
    """
    if program.axis_size("pp") * program.axis_size("tp") == 1:
        return []
    slots = [_NOTHING] * (2 * program.axis_size("dp"))
    if known:
        own = 2 * program.axis_rank("dp")
        slots[own : own + 2] = content, -content
    return slots


def check_contents(slots: list[int]) -> None:
    """Raise ``BuildError`` if ranks of one replica have different batches, from the reduced slots."""
    if (replica := _first_differing_replica(slots)) is not None:
        raise BuildError(
            f"the ranks of replica {replica} were given different batches; give all pipeline stages and tensor-parallel "
            "ranks of one replica the same rows in the same order, e.g. by one seed for their data loaders"
        )


def check_boundaries(slots: list[int]) -> None:
    """Raise ``BuildError`` if ranks of one replica planned different stage boundaries, from the reduced slots."""
    if (replica := _first_differing_replica(slots)) is not None:
        raise BuildError(
            f"the ranks of replica {replica} planned different stage boundaries; the model's code must not depend on the rank, "
            "and what is frozen has to be frozen in the whole model, on every rank"
        )


def _first_differing_replica(slots: list[int]) -> int | None:
    """Return the first replica whose ranks have different numbers, or None."""
    pairs = zip(slots[::2], slots[1::2], strict=True)
    return next((replica for replica, (high, low) in enumerate(pairs) if high != -low), None)


def check_shapes(high: int, low: int) -> None:
    """Raise ``BuildError`` if the largest and the smallest fingerprint of all ranks' batches differ."""
    if high != low:
        raise BuildError(
            "the ranks were given batches of different names, shapes or types, or some train while others evaluate; give "
            "each rank a batch of the same shape, and call the same method"
        )


def compute_weights(program: Program, device: torch.device, counts: list[tuple[int, ...]], kinds: list[int]) -> LabelWeights:
    """Return the weights of micro-batches from new label counts and kinds as in ``Cut``. Collective."""
    row = torch.tensor(_label_fingerprints(counts, kinds), dtype=torch.int64, device=device)
    high, is_ambiguous, low = all_reduce(row, program.mesh, dist.ReduceOp.MAX).tolist()
    return _weights(program, device, counts, differs=high != -low, is_ambiguous=bool(is_ambiguous))


def _label_fingerprints(counts: list[tuple[int, ...]], kinds: list[int]) -> list[int]:
    """Return the largest fingerprint of a micro-batch's counts, 1 if candidates of one differ, and the negated smallest."""
    numbers = [[own[kind] for kind in kinds] for own in counts]
    prints = [fingerprint(each) for each in numbers]
    return [max(prints), int(any(len(set(each)) > 1 for each in numbers)), -min(prints)]


def _weights(
    program: Program, device: torch.device, counts: list[tuple[int, ...]], differs: bool, is_ambiguous: bool
) -> LabelWeights:
    sums, dp = [sum(each) for each in zip(*counts, strict=True)], program.axis_size("dp")
    if differs and dp > 1:
        totals = reduce_over_replicas(torch.tensor(sums, dtype=torch.int64, device=device), program)
        sums = [int(each) for each in totals.tolist()]
    return LabelWeights(counts, sums, len(counts) * dp, differs, is_ambiguous)
