"""Base class of the engines whose weights ``slapo.ema`` averages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property

from slapo_core import Engine, Program

from ..model.pieces import Piece
from .average_list import AverageList
from .master_values import MasterValue


class AveragedEngine(Engine):
    """Engine that updates its averages after each step, and saves them in its checkpoints."""

    program: Program
    steps: int

    @cached_property
    def averages(self) -> AverageList:
        """Averages of this engine's weights, made by ``slapo.ema``."""
        return AverageList(self)

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """Return this rank's pieces of the parameters and persistent buffers, by their first original names. Collective."""

    @abstractmethod
    def masters(self) -> Iterator[MasterValue]:
        """Iterate over this rank's trained values, which its optimizer steps in place, and over its buffers."""

    def use_masters(self) -> None:
        """Update the model after a write to the values of ``masters``. Collective."""

    def averaging_problem(self) -> str:
        """Return the reason why this engine's weights cannot be averaged; empty if they can."""
        return ""

    def _end_step(self, is_stepped: bool = True) -> None:
        """Count a trained batch, and update the averages.

        Args:
            is_stepped: True if the optimizer stepped; False after an overflow of gradients.
        """
        self.steps += 1
        if is_stepped:
            self.averages.update()
