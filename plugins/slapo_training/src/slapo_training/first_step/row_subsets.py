"""Subsets of a batch's rows: their counts, choice, and combined losses.

Hand-written losses are often means over counts of labels, masks, weights, lengths or padding. With equal counts in all
micro-batches, such a mean equals a mean over rows; the first batch with different counts shows the difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from slapo_core import Program, gather_objects

from ..batches.microbatches import Batch, labels_of
from ..batches.rows import BatchRows
from ..losses.reductions import LabelMean

Marks = dict[str, float]
"""Average counts per row, by argument and kind of count."""


def row_counts(given: Any, ignored: int, without: Collection[str] = ()) -> Marks:
    """Return the counts of some rows, given the arguments of the model and the labels of a loss function.

    Counts called ``without`` are omitted.
    """
    rows, names, numbers = BatchRows().count(given) or 0, [], []
    for index, leaf in enumerate(tree_leaves(given)):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows or not _is_plain(leaf):
            continue
        for kind, number in _numbers_of(leaf, ignored):
            if (name := f"{index}.{kind}") not in without:
                names.append(name)
                numbers.append(number())
    if not numbers:
        return {}
    found = torch.stack([each.to(numbers[0].device, torch.float64) for each in numbers]).tolist()
    return {name: number / rows for name, number in zip(names, found, strict=True)}


def distance(one: Marks, other: Marks) -> float:
    """Return the sum of the relative differences of two rows' counts."""
    found = 0.0
    for name in one.keys() & other.keys():
        size = abs(one[name]) + abs(other[name])
        found += abs(one[name] - other[name]) / size if size else 0.0
    return found


class UnevenRowCounts:
    """Finds the first steps in which counts differ between micro-batches or replicas; ``ignored`` labels do not count."""

    def __init__(self, program: Program, ignored: int) -> None:
        self._program, self._ignored = program, ignored
        self._seen: set[str] = set()
        self._own: list[Marks] = []

    def fingerprints(self, parts: Sequence[Any]) -> list[int]:
        """Return a fingerprint of each micro-batch's counts without those that differed before; sends no message."""
        self._own = [row_counts(part, self._ignored, self._seen) for part in parts]
        return [zlib.crc32(repr(sorted(each.items())).encode()) for each in self._own]

    def end(self) -> None:
        """Exclude the counts that differ in this batch from later steps. Collective over the mesh."""
        everyone = [each for own in gather_objects(self._own, self._program.mesh) for each in own]
        self._seen |= {name for name, number in everyone[0].items() if any(each.get(name) != number for each in everyone)}


def _numbers_of(leaf: torch.Tensor, ignored: int) -> list[tuple[str, Any]]:
    """Return the kinds of counts of a tensor, each with the function that computes it."""
    if leaf.is_floating_point():
        return [("sum", lambda: torch.where((leaf >= 0).all(), leaf.sum(dtype=torch.float64), 0.0))]
    if leaf.dtype is torch.bool:
        return [("true", leaf.sum)]
    numbers = [("labels", (leaf != ignored).sum), ("filled", (leaf != 0).sum)]
    if leaf.dim() == 1:
        return [*numbers, ("length", leaf.sum)]
    return [*numbers, ("end", lambda: _count_repeats(leaf.flip(-1))), ("start", lambda: _count_repeats(leaf))]


def _count_repeats(values: torch.Tensor) -> torch.Tensor:
    """Count how often rows repeat their first value at their start, as padding does."""
    return (values == values[..., :1]).cummin(-1).values[..., 1:].sum() if values.shape[-1] else values.sum()


def _is_plain(leaf: torch.Tensor) -> bool:
    return leaf.layout is torch.strided and not leaf.is_complex() and not leaf.is_quantized and not leaf.is_meta


class Rows(NamedTuple):
    """Some rows of a batch.

    ``batch`` are the arguments of the model; ``labels`` is None if the model computes the loss; ``places`` locates the rows.
    """

    batch: Batch
    labels: Any
    places: BatchRows

    @property
    def number(self) -> int:
        """Number of rows; 0 if no tensor has rows."""
        return self.places.count(self.as_dict()) or 0

    def cut(self, sizes: Sequence[int]) -> list[Rows]:
        """Split the rows into parts of these sizes, in order."""
        return [self.of(part) for part in self.places.cut(self.as_dict(), sizes)]

    def of(self, given: Batch) -> Rows:
        """Return other rows of the same kind, from arguments and labels in one dict."""
        labels = given.pop("labels") if self.labels is not None else None
        return Rows(given, labels, self.places)

    def as_dict(self) -> Batch:
        """Return arguments and labels in one dict."""
        return self.batch if self.labels is None else {**self.batch, "labels": self.labels}


def join_rows(parts: Sequence[Rows]) -> Rows:
    return parts[0].of(parts[0].places.join([part.as_dict() for part in parts]))


def narrow_rows(value: Any, total: int, start: int, size: int) -> Any:
    """Return some rows of every tensor in ``value`` with ``total`` rows."""
    return tree_map(lambda leaf: leaf.narrow(0, start, size) if _has_rows(leaf, total) else leaf, value)


def dissimilar_halves(parts: Sequence[Rows], ignored: int) -> list[Rows]:
    """Return two halves of micro-batches that differ most in labels and masks.

    Together they have as many rows as one micro-batch. For micro-batches of one row, return two, or the same row twice.
    """
    number = parts[0].number
    if number == 1:
        return dissimilar_pair(parts[0], [*parts[1:], parts[0]], ignored)
    half = _second_half(number)
    halves = [part.cut([number - half, half]) for part in parts]
    own, *firsts = [first for first, _ in halves]
    others = [second for _, second in halves] + (firsts if number == 2 * half else [])
    return dissimilar_pair(own, others, ignored)


def dissimilar_quarters(halves: Sequence[Rows], ignored: int) -> tuple[list[Rows], bool]:
    """Return two quarters of a micro-batch that differ most in labels and masks, and whether they are the first half.

    Together they have as many rows as the first half, at least two. One of them is the start of the first half. ``halves``
    may be one half alone.
    """
    half, *others = halves
    size = _second_half(half.number)
    own, second = half.cut([half.number - size, size])
    pair = dissimilar_pair(
        own, [second, *(part for each in others for part in each.cut([size] * (each.number // size)))], ignored
    )
    return pair, pair[1] is second


def _second_half(number: int) -> int:
    """Return the number of rows in the second half; even if possible, since rows may come in pairs."""
    half = number // 2
    return half + 1 if number % 2 == 0 and half % 2 == 1 and number > 2 else half


def dissimilar_pair(own: Rows, others: Sequence[Rows], ignored: int) -> list[Rows]:
    """Return ``own``, and the rows of ``others`` that differ most from it in labels and masks."""
    marks = row_counts(own.as_dict(), ignored)
    return [own, max(others, key=lambda other: distance(marks, row_counts(other.as_dict(), ignored)))]


def other_replicas(own: Rows, program: Program, device: torch.device, ignored: int) -> list[Rows]:
    """Return the rows of the first replica and of the most different one, without this rank's. Collective over replicas."""
    if program.mesh is None or program.axis_size("dp") == 1:
        return []
    group, found = program.mesh.get_group("dp"), list[Rows]()
    marks: list[Marks] = [{}] * group.size()
    dist.all_gather_object(marks, row_counts(own.as_dict(), ignored), group=group)
    for source in (0, max(range(1, len(marks)), key=lambda index: distance(marks[0], marks[index]))):
        sent = [_to_device("cpu", (own.batch, own.labels)) if source == group.rank() else None]
        dist.broadcast_object_list(sent, group=group, group_src=source)
        if source != group.rank() and sent[0] is not None:
            found.append(Rows(*_to_device(device, sent[0]), own.places))
    return found


def expected_losses(
    parts: Sequence[Rows], losses: Sequence[float], counted: Sequence[LabelMean | None], ignored: int
) -> list[float]:
    """Return the possible losses of all parts together, for a mean over rows or over labels.

    ``counted`` are the reductions of the losses; if all are known, the engine weights by them.
    """
    known = [each.labels for each in counted if isinstance(each, LabelMean)]
    if len(known) == len(counted):
        return [_weighted_mean(losses, known)]
    whole, rest = zip(*labels_of([part.as_dict() for part in parts], ignored), strict=True)
    # with a known reduction the engine weights by labels; with an unknown one it refuses uneven labels
    weights = ([part.number for part in parts], whole, rest)
    return [_weighted_mean(losses, each) for each in weights if sum(each)]


def _weighted_mean(losses: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:
        return float("nan")
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / total


def _to_device(device: torch.device | str, rows: tuple[Batch, Any]) -> tuple[Batch, Any]:
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, rows)
    return moved[0], moved[1]


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
