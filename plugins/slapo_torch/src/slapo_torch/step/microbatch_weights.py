"""Weights of micro-batches in the loss of the batch, if their losses are means over labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from slapo_core import BuildError
from slapo_training.first_step import scaled_gradient
from slapo_training.losses import EQUAL_PARTS, UNKNOWN_REDUCTION, CombinedMeans, LabelMean, LossReduction

LABELS_CHANGED = f"the model injects gradients, and its loss is a mean over other labels than the batch shows; {EQUAL_PARTS}"
"""Message of the error after a step with losses weighted by wrong numbers of labels."""


class LabelCount:
    """Estimated number of labels of a micro-batch: the number of the step before, so that most steps need no correction.

    Attributes:
        value: Equal on all ranks; 0 before the first step.
    """

    value: float = 0.0

    def state(self) -> float:
        """Return the state for a checkpoint; with it, later steps round as without the checkpoint."""
        return self.value

    def restore(self, state: float) -> None:
        self.value = state


class MicroBatchWeight(NamedTuple):
    """Weight of each micro-batch's loss in the loss of the batch.

    A loss over n labels is multiplied by ``n / (parts * unit)``. At the end of the step, gradients are multiplied by
    ``parts * unit / N``, with N the number of all labels. If the reduction is unknown, all losses are divided by ``parts``.

    Args:
        parts: Number of micro-batches of each replica.
        unit: Estimated number of labels of a micro-batch, equal on all ranks.
        differs: True if micro-batches or ranks have different numbers of labels, so that reductions must be known.
        scale: Loss scale of fp16, which multiplies all weights.
        is_single: True if no rank has another micro-batch.
        injects: True if the model injects gradients. Injected gradients are not divided by ``parts``; so gradients of losses
            are multiplied by ``parts``, and gradients of parameters are divided by it at the end of the step.
    """

    parts: int
    unit: float = 1.0
    differs: bool = False
    scale: float = 1.0
    is_single: bool = False
    injects: bool = False

    def weight_loss(self, loss: torch.Tensor, reduction: LossReduction) -> torch.Tensor:
        """Return the weighted loss of a micro-batch, given its reduction over labels."""
        return scaled_gradient(self._value(loss, reduction), self.parts if self.injects else 1.0)

    def _value(self, loss: torch.Tensor, reduction: LossReduction) -> torch.Tensor:
        if not isinstance(reduction, LabelMean) or reduction.labels == self.unit:
            return loss * self.scale / self.parts if self.scale != 1.0 else loss / self.parts
        known = loss if reduction.labels else loss.nan_to_num()  # a mean over no labels is NaN
        return known * (self.scale * reduction.labels / (self.parts * self.unit))

    def batch_mean(
        self, total: float | torch.Tensor, labels: float | None, dp: int
    ) -> tuple[float | torch.Tensor, float, float]:
        """Return the loss of a batch, of the type of ``total``, the remaining factor of its gradients, and the next ``unit``.

        Args:
            labels: Number of labels of all micro-batches; None if the losses are no means over labels.

        Raises:
            BuildError: the model injects gradients, and the batch has other labels than the loss.
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
    """Return one rank's reductions as numbers; ``total_labels`` reads their sums over ranks."""
    counts = [each.labels for each in reductions if isinstance(each, LabelMean)]
    combined = [each.fingerprint for each in reductions if isinstance(each, CombinedMeans)]
    return [sum(counts), len(counts), len(reductions), len(combined), sum(combined), sum(each**2 for each in combined)]


def total_labels(numbers: Sequence[float]) -> float | None:
    """Return the number of labels of all losses, from summed ``reduction_sums``; None if losses are no means over labels.

    Raises:
        BuildError: some losses only are means over labels, or losses combine means over different numbers of labels.
    """
    labels, means, losses, combined, total, squares = numbers
    if means not in (0, losses):
        raise BuildError("what the loss is a mean over can be told for some micro-batches only; " + EQUAL_PARTS)
    if combined * squares != total * total:  # Cauchy-Schwarz: the fingerprints are not all equal
        raise BuildError(UNKNOWN_REDUCTION)
    return labels if means else None
