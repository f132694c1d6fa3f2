"""Weights of micro-batches in the loss of a batch, for engines that sum gradients while the batch runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slapo_core.errors import BuildError

from .first_step import scaled_gradient
from .means import EQUAL_PARTS, UNKNOWN_REDUCTION, Counted, LossReduction


class LabelWeights:
    """Factors for the losses of micro-batches, whose mean over all parts is then the loss of the whole batch.

    Which of a batch's labels enter a loss, all of them or all but each row's first (next-token losses), the losses show as they
    are computed; both numbers are known before.

    Args:
        own: For each of this rank's micro-batches both numbers, see ``batches.labels_of``.
        totals: Both numbers over the micro-batches of all replicas.
        num_parts: Number of micro-batches of all replicas.
        differs: Whether some of these have different numbers of labels.

    Attributes:
        kind: Which of the numbers counts, 0 or 1; None until it is told, where they differ.
        gradient: Additional factor of the gradients of losses, see ``FirstStep.scale``.
    """

    def __init__(self, own: Sequence[tuple[int, int]], totals: tuple[int, int], num_parts: int, differs: bool) -> None:
        self._own, self._totals, self._num_parts, self._differs = own, totals, num_parts, differs
        self.kind: int | None = None
        self.gradient = 1.0

    @classmethod
    def alike(cls, parts: int) -> LabelWeights:
        """Return the weights of micro-batches that count alike, whatever labels they have."""
        return cls([(0, 0)] * parts, (0, 0), parts, differs=False)

    @property
    def is_open(self) -> bool:
        """Whether it matters which of the numbers counts, and that is not known yet."""
        return self._differs and self.kind is None

    def shows(self, index: int, terms: Sequence[Counted]) -> bool:
        """Return whether a micro-batch has each of these numbers of labels."""
        return all(each.labels in self._own[index] for each in terms)

    def kinds_of(self, index: int, counted: LossReduction) -> set[int]:
        """Return the kinds of labels that a micro-batch's loss may be a mean over.

        Raises:
            BuildError: the reduction is unknown, or over another number of labels than the batch shows.
        """
        if not isinstance(counted, Counted):
            raise BuildError(UNKNOWN_REDUCTION)
        if found := {kind for kind in (0, 1) if self._own[index][kind] == counted.labels}:
            return found
        raise BuildError(
            f"a micro-batch's loss is a mean over {counted.labels} labels, and micro-batches or ranks have different numbers "
            f"of them, but the batch does not show so many; {EQUAL_PARTS}"
        )

    def of(self, index: int, counted: LossReduction) -> float:
        """Return the factor of a micro-batch's loss.

        Args:
            index: Number of the micro-batch.
            counted: The reduction of its loss.

        Raises:
            BuildError: micro-batches have different numbers of labels, and what this loss is a mean over cannot be told.
        """
        if not self._differs:
            return 1.0
        if self.kind not in self.kinds_of(index, counted):
            raise BuildError(f"the loss is a mean over other labels than in earlier steps; {EQUAL_PARTS}")
        assert self.kind is not None
        return self._own[index][self.kind] * self._num_parts / self._totals[self.kind] if self._totals[self.kind] else 0.0

    def weighted(self, index: int, loss: torch.Tensor, counted: LossReduction) -> torch.Tensor:
        """Return a micro-batch's loss times its factor; a mean over no labels, which is NaN, gives zero."""
        factor = self.of(index, counted)
        if factor != 1.0:
            loss = loss * factor if factor else loss.nan_to_num() * 0.0
        return scaled_gradient(loss, self.gradient)
