"""Weights of micro-batches, whose losses are means over labels, in the loss of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from slapo_core import BuildError
from slapo_training.first_step import scaled_gradient
from slapo_training.losses import EQUAL_PARTS, UNKNOWN_REDUCTION, CombinedMeans, Counted, LossReduction

LABELS_CHANGED = f"the model injects gradients, and its loss is a mean over other labels than the batch shows; {EQUAL_PARTS}"
"""Error after a step whose losses were weighted by wrong numbers of labels."""


class LabelCount:
    """Estimated number of labels of a micro-batch: that of the step before, so that shares need no correction.

    Attributes:
        value: Equal on all ranks; 0 before the first step.
    """

    value: float = 0.0

    def state(self) -> float:
        """Return the state for a checkpoint, so that steps after it round as they would have."""
        return self.value

    def restore(self, state: float) -> None:
        """Go on from ``state``."""
        self.value = state


class MicroBatchWeight(NamedTuple):
    """Share of each micro-batch's loss in the loss of the batch.

    A loss over n labels is taken ``n / (parts * unit)`` times, and in the end all by ``parts * unit / N`` for N labels in all.
    A loss of unknown reduction is taken ``1 / parts`` times, as are all others then.

    Args:
        parts: Micro-batches of each replica.
        unit: Estimated number of labels of a micro-batch, equal on all ranks.
        differs: Whether micro-batches or ranks have different numbers of labels, so that reductions have to be known.
        scale: Loss scale of fp16, which multiplies all shares.
        is_single: True if no rank has another micro-batch.
        injects: Whether the model injects gradients: these are not divided by ``parts`` as the loss is, so that gradients of
            losses are multiplied by it, and gradients of parameters divided in the end.
    """

    parts: int
    unit: float = 1.0
    differs: bool = False
    scale: float = 1.0
    is_single: bool = False
    injects: bool = False

    def weighted(self, loss: torch.Tensor, reduction: LossReduction) -> torch.Tensor:
        """Return this weight of a loss.

        Args:
            loss: A micro-batch's loss.
            reduction: Its reduction over labels.
        """
        return scaled_gradient(self._value(loss, reduction), self.parts if self.injects else 1.0)

    def _value(self, loss: torch.Tensor, reduction: LossReduction) -> torch.Tensor:
        if not isinstance(reduction, Counted) or reduction.labels == self.unit:
            return loss * self.scale / self.parts if self.scale != 1.0 else loss / self.parts
        known = loss if reduction.labels else loss.nan_to_num()  # of no labels a mean is not a number
        return known * (self.scale * reduction.labels / (self.parts * self.unit))

    def batch_mean(
        self, total: float | torch.Tensor, labels: float | None, dp: int
    ) -> tuple[float | torch.Tensor, float, float]:
        """Return the loss of a batch, the remaining factor of its gradients, and the next ``unit``.

        Args:
            total: Sum of these shares over all replicas; a number, or a tensor of one, which the loss then is as well.
            labels: Number of labels of all micro-batches; None where the losses are no means over labels.
            dp: Number of replicas.

        Returns:
            The loss, the factor that the gradients still need, and the next step's ``unit``.

        Raises:
            BuildError: the model injects gradients, and the labels are others than the batch shows.
        """
        scale = self.scale * (self.parts if self.injects else 1)
        if labels is None:
            return total / dp / self.scale, 1.0 / scale, self.unit
        unit = labels / (self.parts * dp)
        if self.injects and unit != self.unit:
            raise BuildError(LABELS_CHANGED)
        factor = self.unit / unit if labels else 1.0
        return (total / dp * factor / self.scale if labels else float("nan")), factor / scale, unit


def reduction_sums(reductions: Sequence[LossReduction]) -> list[float]:
    """Return the reductions of one rank's losses as numbers to be summed over ranks; ``total_labels`` reads the sums."""
    counts = [each.labels for each in reductions if isinstance(each, Counted)]
    combined = [each.number for each in reductions if isinstance(each, CombinedMeans)]
    return [sum(counts), len(counts), len(reductions), len(combined), sum(combined), sum(each**2 for each in combined)]


def total_labels(numbers: Sequence[float]) -> float | None:
    """Return the number of labels of all losses together, from the sums of ``reduction_sums``; None where they are no means.

    Raises:
        BuildError: only some losses are means over labels; or they combine means over different numbers of labels.
    """
    labels, means, losses, combined, total, squares = numbers
    if means not in (0, losses):
        raise BuildError("what the loss is a mean over can be told for some micro-batches only; " + EQUAL_PARTS)
    if combined * squares != total * total:  # their numbers are not all equal
        raise BuildError(UNKNOWN_REDUCTION)
    return labels if means else None
