"""Parameters of one stage as an engine holds them over a step, for runs on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class StageParameters:
    """Parameters that stay whole for the whole step; engines that gather and free parameters have a subclass.

    A planner calls ``bind``, ``begin_step``, ``microbatch`` once for each micro-batch, ``end_step`` and ``close``.

    Attributes:
        held: Parameters of this rank between steps, which the optimizer steps; fake tensors.
        whole: Parameters that the stage computes with, in the order of the module; fake tensors.
    """

    held: list[nn.Parameter]
    whole: list[nn.Parameter]

    def bind(self, module: nn.Module) -> None:
        """Take the parameters of a stage, which are fake tensors until ``close``; gathered forms are freed."""
        self.held = self.whole = [*module.parameters()]

    def begin_step(self) -> None:
        """Allocate what the engine gathers for the whole step."""

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Context of one forward and its backward."""
        yield

    def end_step(self) -> None:
        """Reduce gradients and free parameters as the engine does after the last backward."""

    def close(self) -> None:
        """Remove what ``bind`` has put into the module."""
