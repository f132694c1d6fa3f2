"""Losses over labels that a batch does not show, as a model makes them itself, in engines that weigh losses by the batch."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import BuildError, Program, gather_objects

from .label_weights import LabelWeights
from .losses.reductions import EQUAL_PARTS, LossReduction, terms_of


class HiddenLabels:
    """Checks that micro-batches have equal numbers of labels where the batch does not show these.

    Args:
        program: Its mesh has the ranks.

    Attributes:
        is_checked: Whether a batch was checked, on all ranks.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.is_checked = False
        self._shown: set[bool] = set()

    def check(self, reductions: Sequence[LossReduction], weights: LabelWeights, training: bool) -> None:
        """Compare the reductions of a batch's losses. Collective until a batch shows its labels.

        Args:
            reductions: The reduction of each micro-batch's loss; empty on ranks that compute no losses.
            weights: The weights of these micro-batches.
            training: Whether the model was in training mode.

        Raises:
            BuildError: on all ranks: the numbers differ.
        """
        if training in self._shown:
            return
        own = [(terms, weights.shows(index, terms)) for index, terms in enumerate(map(terms_of, reductions))]
        found = [each for of_rank in gather_objects(own, self._program.mesh) for each in of_rank]
        hidden = {terms for terms, is_shown in found if not is_shown}
        if not hidden and (self.is_checked or any(terms for terms, _ in found)):
            self._shown.add(training)  # of losses that tell nothing, as in-place writes hide it without a graph, the step does
        self.is_checked = True
        if hidden and len({terms for terms, _ in found}) > 1:
            raise BuildError(
                "the losses of micro-batches or ranks are means over different numbers of labels, which the batch does not "
                f"show, or are made of such means; {EQUAL_PARTS}"
            )

    def are_shown(self, training: bool) -> bool:
        """Return whether a batch has shown its labels in this mode."""
        return training in self._shown
