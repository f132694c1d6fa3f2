"""Parameters of one stage as an engine holds them over a step, for runs on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn


class GradientSize(NamedTuple):
    """Gradient of one parameter.

    Args:
        numel: Number of elements.
        dtype: Type of the parameter.
    """

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StageParameters:
    """Parameters that stay whole for the whole step; engines that gather and free parameters have a subclass.

    A planner calls ``bind``, ``begin_step``, ``microbatch`` once for each micro-batch, ``end_step`` and ``close``.

    Attributes:
        whole: Parameters that the stage computes with, in the order of the module; fake tensors.
        held: What this rank keeps of each between steps, and the optimizer steps; fake tensors.
        units_ahead: Number of following blocks whose parameters a block's work gathers; None if blocks differ in that work, so
            that none stands for another.
    """

    units_ahead: int | None = 0

    held: list[nn.Parameter]
    whole: list[nn.Parameter]

    def bind(self, module: nn.Module, originals: Mapping[int, torch.Tensor]) -> None:
        """Take the parameters of a stage, which are fake tensors until ``close``.

        Args:
            module: The stage's module; of equal blocks some may be left out.
            originals: The parameter that each fake one stands for, by the id of the fake one.
        """
        self.held = self.whole = [*module.parameters()]

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """Return bytes and number of elements of what this rank keeps of a module's parameters between steps."""
        found = [*module.parameters()]
        storages = [each.untyped_storage() for each in found]
        nbytes = sum({id(storage): storage.nbytes() for storage in storages}.values())
        return nbytes, sum(each.numel() for each in found)

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
