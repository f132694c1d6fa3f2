"""Check of losses over labels that a model makes itself, in engines that weight losses by the batch's labels."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core import BuildError, Program, gather_objects

from .label_weights import LabelWeights
from .losses.reductions import EQUAL_PARTS, LossReduction, terms_of


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
