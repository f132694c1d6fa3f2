"""Losses over labels that a batch does not show, as a model makes them itself, in engines that weigh losses by the batch."""

from __future__ import annotations

from collections.abc import Sequence

from slapo_core.agreement import gather
from slapo_core.errors import BuildError
from slapo_core.program import Program

from .label_weights import LabelWeights
from .means import EQUAL_PARTS, Counted, Mixed, Told


class HiddenLabels:
    """Looks whether the losses of micro-batches are means over equal numbers of labels, where the batch does not show these.

    Args:
        program: Its mesh says which ranks.

    Attributes:
        is_checked: Whether that was looked at, on all ranks.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.is_checked = False
        self._shown: set[bool] = set()

    def check(self, told: Sequence[Told], weights: LabelWeights, training: bool) -> None:
        """Compare what the losses of a batch are means over. Collective until a batch shows it.

        Args:
            told: Of each micro-batch; empty on ranks that compute no losses.
            weights: Of these micro-batches.
            training: Whether the model was in training mode.

        Raises:
            BuildError: on all ranks: the numbers differ.
        """
        if training in self._shown:
            return
        own = [(_terms(each), weights.shows(index, _terms(each))) for index, each in enumerate(told)]
        found = [each for of_rank in gather(own, self._program.mesh) for each in of_rank]
        hidden = {terms for terms, is_shown in found if not is_shown}
        if not hidden and (self.is_checked or any(terms for terms, _ in found)):
            self._shown.add(training)  # of losses that tell nothing, as in-place writes hide it without a graph, the step does
        self.is_checked = True
        if hidden and len({terms for terms, _ in found}) > 1:
            raise BuildError(
                "the losses of micro-batches or ranks are means over different numbers of labels, which the batch does not "
                f"show, or are made of such means; {EQUAL_PARTS}"
            )


def _terms(told: Told) -> tuple[Counted, ...]:
    return told.terms if isinstance(told, Mixed) else () if told is None else (told,)
