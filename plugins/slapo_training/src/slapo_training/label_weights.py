"""What each micro-batch weighs in the loss of a batch, for engines that sum gradients while the batch runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slapo_core.errors import BuildError

from .means import EQUAL_PARTS, Counted


class LabelWeights:
    """Factors for the losses of micro-batches, whose mean over all parts is then the loss of the whole batch.

    Which of a batch's labels enter a loss, all of them or all but each row's first (next-token losses), the losses show as they
    are computed; both numbers are known before.

    Args:
        own: For each of this rank's micro-batches both numbers, see ``batches.labels_of``.
        totals: Both numbers over the micro-batches of all replicas.
        num_parts: Micro-batches of all replicas.
        differs: Whether some of these have different numbers of labels.
    """

    def __init__(self, own: Sequence[tuple[int, int]], totals: tuple[int, int], num_parts: int, differs: bool) -> None:
        self._own, self._totals, self._num_parts, self._differs = own, totals, num_parts, differs
        self._kinds = {0, 1}

    def of(self, index: int, counted: Counted | None) -> float:
        """The factor of a micro-batch's loss.

        Args:
            index: Number of the micro-batch.
            counted: What its loss is a mean over.

        Raises:
            BuildError: micro-batches have different numbers of labels, and what this loss is a mean over cannot be told.
        """
        if not self._differs:
            return 1.0
        if counted is None:
            raise BuildError(
                "micro-batches or ranks have different numbers of labels, and what the loss is a mean over cannot be told, as "
                f"it is no plain cross_entropy; {EQUAL_PARTS}"
            )
        self._kinds = {kind for kind in self._kinds if self._own[index][kind] == counted.labels}
        factors = {counted.labels * self._num_parts / self._totals[kind] for kind in self._kinds if self._totals[kind]}
        if len(factors) != 1:
            raise BuildError(
                "micro-batches or ranks have different numbers of labels, and how many enter the loss cannot be told from the "
                f"batch; {EQUAL_PARTS}"
            )
        return factors.pop()

    def weighted(self, index: int, loss: torch.Tensor, counted: Counted | None) -> torch.Tensor:
        """A micro-batch's loss times its factor; one over no labels, which is not a number, is zero."""
        factor = self.of(index, counted)
        if factor == 1.0:
            return loss
        return loss * factor if factor else loss.nan_to_num() * 0.0
