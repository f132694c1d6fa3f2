"""What each micro-batch's mean over labels weighs in the loss of the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slapo_training.first_step import scaled_gradient
from slapo_training.means import Counted


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

    def of(self, loss: torch.Tensor, counted: Counted | None) -> torch.Tensor:
        """This share of a loss, which is a mean over ``counted`` labels."""
        return scaled_gradient(self._value(loss, counted), self.parts if self.injects else 1.0)

    def _value(self, loss: torch.Tensor, counted: Counted | None) -> torch.Tensor:
        if counted is None or counted.labels == self.unit:
            return loss * self.scale / self.parts if self.scale != 1.0 else loss / self.parts
        known = loss if counted.labels else loss.nan_to_num()  # of no labels a mean is not a number
        return known * (self.scale * counted.labels / (self.parts * self.unit))
