"""Rows of a micro-batch cut into parts, and losses of parts put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..batches import Batch, labels_of, rows_of
from ..means import Counted


class Rows(NamedTuple):
    """Some rows of a batch.

    Args:
        batch: The model's arguments.
        labels: For the loss function; None where the model makes the loss itself.
    """

    batch: Batch
    labels: Any

    @property
    def number(self) -> int:
        """Number of rows; 0 where no tensor has any."""
        return rows_of(self.batch) or 0

    def cut(self, sizes: Sequence[int]) -> list[Rows]:
        """Cut the rows into parts of these sizes, in order."""
        total, starts = self.number, [sum(sizes[:index]) for index in range(len(sizes))]

        def part(start: int, size: int) -> Any:
            def narrowed(leaf: Any) -> Any:
                return leaf.narrow(0, start, size) if _has(leaf, total) else leaf

            return narrowed

        return [Rows(*tree_map(part(start, size), tuple(self))) for start, size in zip(starts, sizes, strict=True)]


def joined(parts: Sequence[Rows]) -> Rows:
    """Put the rows of several parts into one."""
    first, total = parts[0], parts[0].number
    others = [tree_leaves(tuple(part)) for part in parts[1:]]
    position = iter(range(len(tree_leaves(tuple(first)))))

    def together(leaf: Any) -> Any:
        index = next(position)
        return torch.cat([leaf, *(leaves[index] for leaves in others)]) if _has(leaf, total) else leaf

    return Rows(*tree_map(together, tuple(first)))


def with_labels(part: Rows) -> Batch:
    """Return the arguments together with the labels of a loss function, as they were given."""
    return part.batch if part.labels is None else {**part.batch, "labels": part.labels}


def narrowed(value: Any, total: int, start: int, size: int) -> Any:
    """Return some rows of every tensor in ``value`` that has ``total`` of them."""
    return tree_map(lambda leaf: leaf.narrow(0, start, size) if _has(leaf, total) else leaf, value)


def whole_and_parts(parts: Sequence[Rows]) -> tuple[Rows, list[Rows]]:
    """Return a micro-batch and its two halves; of micro-batches of one row, two of them together, and each of these."""
    number = parts[0].number
    if number > 1:
        return parts[0], parts[0].cut([number - number // 2, number // 2])
    pair = [parts[0], parts[1] if len(parts) > 1 else parts[0]]
    return joined(pair), pair


def expected_losses(
    parts: Sequence[Rows], losses: Sequence[float], counted: Sequence[Counted | None], ignored: int
) -> list[float]:
    """Return what the loss of all parts together may be, if it is a mean over rows or over labels.

    Args:
        parts: Rows of each.
        losses: The loss of each.
        counted: What each of these is a mean over; where it is known the engine weighs by it.
        ignored: Label value that the loss leaves out.
    """
    if all(each is not None for each in counted):
        return [_weighted(losses, [each.labels for each in counted if each is not None])]
    whole, rest = zip(*labels_of([with_labels(part) for part in parts], ignored), strict=True)
    # an engine refuses other numbers of labels of which it does not know what they are to the loss
    weights = ([part.number for part in parts], whole, rest)
    return [_weighted(losses, each) for each in weights if sum(each)]


def _weighted(losses: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:
        return float("nan")
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / total


def _has(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
