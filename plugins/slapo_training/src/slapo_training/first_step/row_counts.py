"""Counts in the rows of a batch: labels, masks, weights, lengths, and padding.

Hand-written losses are often means over such counts. With equal counts in all micro-batches, such a mean equals a mean over
rows; the first batch with different counts shows the difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core import Program, gather_objects

from ..batches.rows import BatchRows

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
