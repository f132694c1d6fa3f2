"""Weights of micro-batches in the loss of a batch, for engines that sum gradients while the batch runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slapo_core import BuildError, Program, gather_objects

from .first_step import scaled_gradient
from .losses.reductions import EQUAL_PARTS, UNKNOWN_REDUCTION, LabelMean, LossReduction, terms_of

__all__ = ["LabelWeights"]


class HiddenLabels:
    """Checks that micro-batches have equal numbers of labels if the batch does not show them.

    Attributes:
        is_checked: True if a batch was checked, on all ranks.
        shown: Modes, True for training, in which a batch has shown its labels.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.is_checked = False
        self.shown: set[bool] = set()

    def check(self, reductions: Sequence[LossReduction], weights: LabelWeights, training: bool) -> None:
        """Compare the reductions of a batch's losses, none on ranks without losses. Collective until a batch shows its labels.

        Raises:
            BuildError: on all ranks: the numbers differ.
        """
        if training in self.shown:
            return
        own = [(terms, weights.has_counts(index, terms)) for index, terms in enumerate(map(terms_of, reductions))]
        found = [each for of_rank in gather_objects(own, self._program.mesh) for each in of_rank]
        hidden = {terms for terms, is_shown in found if not is_shown}
        if not hidden and (self.is_checked or any(terms for terms, _ in found)):
            self.shown.add(training)  # unknown reductions say nothing: without a graph, in-place writes hide them
        self.is_checked = True
        if hidden and len({terms for terms, _ in found}) > 1:
            raise BuildError(
                "the losses of micro-batches or ranks are means over different numbers of labels, which the batch does not "
                f"show, or are made of such means; {EQUAL_PARTS}"
            )


OTHER_LABELS = f"the loss is a mean over other labels than in earlier steps; {EQUAL_PARTS}"
"""Error of a loss over labels that the batch does not show, where it showed them before."""


class LabelWeights:
    """Factors for the losses of micro-batches, whose mean over all parts is then the loss of the whole batch.

    Which of a batch's arguments are the labels, and whether all of them enter a loss or all but each row's first (next-token
    losses), the losses show as they are computed; all these numbers are known before.

    Args:
        own: For each of this rank's micro-batches these numbers, see ``batches.label_counts``.
        totals: The numbers over the micro-batches of all replicas.
        num_parts: Number of micro-batches of all replicas.
        differs: Whether some of these have different numbers of labels.
        is_ambiguous: Whether on some rank it matters which of the numbers counts.

    Attributes:
        kind: Which of the numbers counts; None until it is told.
        known: Those of which one counts, by what earlier losses have shown; where it matters ``kind`` is one of them.
        is_shown: Whether losses have been means over labels that the batch shows, so that others are an error.
        gradient: Additional factor of the gradients of losses, see ``FirstStep.scale``.
    """

    def __init__(
        self, own: Sequence[tuple[int, ...]], totals: Sequence[int], num_parts: int, differs: bool, is_ambiguous: bool = True
    ) -> None:
        self._own, self._totals, self._num_parts, self._differs = own, totals, num_parts, differs
        self._is_ambiguous = is_ambiguous
        self.kind: int | None = None
        self.known: Sequence[int] = ()
        self.is_shown = False
        self.gradient = 1.0

    @classmethod
    def equal(cls, parts: int) -> LabelWeights:
        """Return the weights of micro-batches that count alike, whatever labels they have."""
        return cls([(0, 0)] * parts, (0, 0), parts, differs=False)

    @property
    def is_open(self) -> bool:
        """True if it matters which of the numbers counts, and that is not known yet."""
        return self._differs and self._is_ambiguous

    def has_counts(self, index: int, terms: Sequence[LabelMean]) -> bool:
        """Return whether a micro-batch has each of these numbers of labels, in what is known to be the labels."""
        own = self._own[index]
        known = (*own[:2], *(own[kind] for kind in self.known))
        return all(each.labels in known for each in terms)

    def kinds_of(self, index: int, counted: LossReduction) -> set[int]:
        """Return the kinds of labels that a micro-batch's loss may be a mean over.

        Raises:
            BuildError: the reduction is unknown, or over another number of labels than the batch shows.
        """
        if not isinstance(counted, LabelMean):
            raise BuildError(UNKNOWN_REDUCTION)
        if found := {kind for kind, number in enumerate(self._own[index]) if number == counted.labels}:
            return found
        raise BuildError(
            f"a micro-batch's loss is a mean over {counted.labels} labels, and micro-batches or ranks have different numbers "
            f"of them, but the batch does not show so many; {EQUAL_PARTS}"
        )

    def of(self, index: int, counted: LossReduction) -> float:
        """Return the factor of a micro-batch's loss.

        Raises:
            BuildError: micro-batches have different numbers of labels, and what this loss is a mean over cannot be told.
        """
        if not self._differs:
            if self.is_shown and not self.has_counts(index, terms_of(counted)):
                raise BuildError(OTHER_LABELS)
            return 1.0
        if self.kind not in self.kinds_of(index, counted):
            raise BuildError(OTHER_LABELS)
        assert self.kind is not None
        return self._own[index][self.kind] * self._num_parts / self._totals[self.kind] if self._totals[self.kind] else 0.0

    def weight_loss(self, index: int, loss: torch.Tensor, counted: LossReduction) -> torch.Tensor:
        """Return a micro-batch's loss times its factor; a mean over no labels, which is NaN, gives zero."""
        factor = self.of(index, counted)
        if factor != 1.0:
            loss = loss * factor if factor else loss.nan_to_num() * 0.0
        return scaled_gradient(loss, self.gradient)
