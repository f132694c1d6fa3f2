"""Base of the engines whose weights ``slapo.ema`` averages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property

from slapo_core import Engine, Program

from ..model.pieces import Piece
from .average_list import AverageList
from .master_values import MasterValue


class AveragedEngine(Engine):
    """An engine that tells its averages of each step, and keeps them in its checkpoints."""

    program: Program
    steps: int

    @cached_property
    def averages(self) -> AverageList:
        """Averages of this engine's weights, those that ``slapo.ema`` has made of it."""
        return AverageList(self)

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of the parameters and persistent buffers, by their first original names. Collective."""

    @abstractmethod
    def masters(self) -> Iterator[MasterValue]:
        """Iterate over the values of this rank that are trained, as its optimizer steps them in place, and over the buffers."""

    def use_masters(self) -> None:
        """Let the model run with values that were written into those of ``masters``. Collective."""

    def averaging_problem(self) -> str:
        """Return the reason for which this engine's weights cannot be averaged; nothing where they can."""
        return ""

    def _end_step(self, is_stepped: bool = True) -> None:
        """Count a batch that was trained, and average the new weights.

        Args:
            is_stepped: Whether the optimizer has stepped; not where gradients overflowed.
        """
        self.steps += 1
        if is_stepped:
            self.averages.update()
