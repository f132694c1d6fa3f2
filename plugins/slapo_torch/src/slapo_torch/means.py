"""What each micro-batch's mean over labels weighs in the loss of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from slapo_core.errors import BuildError
from slapo_training.first_step import scaled_gradient
from slapo_training.means import EQUAL_PARTS, UNTOLD, Counted, Mixed, Told

OTHER_LABELS = f"the model injects gradients, and its loss is a mean over other labels than the batch shows; {EQUAL_PARTS}"
"""Said behind a step whose losses were weighted by other numbers of labels than theirs."""


class LabelCount:
    """About how many labels a micro-batch has: as many as in the step before, so that shares need no correction.

    Attributes:
        value: Equal on all ranks; 0 before the first step.
    """

    value: float = 0.0

    def state(self) -> float:
        """What a checkpoint keeps, so that steps after it round as they would have."""
        return self.value

    def put(self, state: float) -> None:
        """Go on from ``state``."""
        self.value = state


class Share(NamedTuple):
    """What the loss of each micro-batch adds to the loss of the batch.

    A loss over n labels is taken ``n / (parts * unit)`` times, and in the end all by ``parts * unit / N`` for N labels in all.
    A loss of which it is not known what it is a mean over is taken ``1 / parts`` times, as are all others then.

    Args:
        parts: Micro-batches of each replica.
        unit: About as many labels as a micro-batch has, equal on all ranks.
        differs: Whether micro-batches or ranks have different numbers of labels, so that theirs have to be known.
        scale: What all is multiplied by beside, with fp16.
        is_all: Whether there is no other micro-batch on any rank.
        injects: Whether the model injects gradients: these are not divided by ``parts`` as the loss is, so that gradients of
            losses are multiplied by it, and gradients of parameters divided in the end.
    """

    parts: int
    unit: float = 1.0
    differs: bool = False
    scale: float = 1.0
    is_all: bool = False
    injects: bool = False

    def of(self, loss: torch.Tensor, counted: Told) -> torch.Tensor:
        """This share of a loss, which is a mean over ``counted`` labels."""
        return scaled_gradient(self._value(loss, counted), self.parts if self.injects else 1.0)

    def _value(self, loss: torch.Tensor, counted: Told) -> torch.Tensor:
        if not isinstance(counted, Counted) or counted.labels == self.unit:
            return loss * self.scale / self.parts if self.scale != 1.0 else loss / self.parts
        known = loss if counted.labels else loss.nan_to_num()  # of no labels a mean is not a number
        return known * (self.scale * counted.labels / (self.parts * self.unit))

    def mean(self, total: float, labels: float | None, dp: int) -> tuple[float, float, float]:
        """Return the loss of a batch, and what that leaves to do.

        Args:
            total: Sum of these shares over all replicas.
            labels: Of all micro-batches; None where the losses are no means over labels.
            dp: Number of replicas.

        Returns:
            The loss, what the gradients are still to be multiplied by, and the next step's ``unit``.

        Raises:
            BuildError: the model injects gradients, and the labels are others than the batch shows.
        """
        scale = self.scale * (self.parts if self.injects else 1)
        if labels is None:
            return total / dp / self.scale, 1.0 / scale, self.unit
        unit = labels / (self.parts * dp)
        if self.injects and unit != self.unit:
            raise BuildError(OTHER_LABELS)
        factor = self.unit / unit if labels else 1.0
        return (total / dp * factor / self.scale if labels else float("nan")), factor / scale, unit


def numbers_of(told: Sequence[Told]) -> list[float]:
    """What the losses of one rank tell, as numbers to be summed over ranks."""
    counts = [each.labels for each in told if isinstance(each, Counted)]
    mixed = [each.number for each in told if isinstance(each, Mixed)]
    return [sum(counts), len(counts), len(told), len(mixed), sum(mixed), sum(each**2 for each in mixed)]


def labels_of(numbers: Sequence[float]) -> float | None:
    """Return how many labels all losses together are means over, from the sum of ``numbers_of``; None where they are not.

    Raises:
        BuildError: some are; or they are made of means over different numbers of labels.
    """
    labels, told, losses, mixed, total, squares = numbers
    if told not in (0, losses):
        raise BuildError("what the loss is a mean over can be told for some micro-batches only; " + EQUAL_PARTS)
    if mixed * squares != total * total:
        raise BuildError(UNTOLD)
    return labels if told else None
