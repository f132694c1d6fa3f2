"""Interface by which a dialect tells the planner how its engine runs a step and what it allocates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slapo_core import Program

from .batches import Batch

__all__ = ["GradientRule", "StepModel"]


class StepModel(ABC):
    """How one engine runs a step of a program; a dialect names its class under ``"step_model"`` in ``Dialect.classes``.

    A planner makes one in a process without real ranks: nothing here communicates, allocates, or changes the model.

    Args:
        program: The program, with a rank for each stage; weights may be on meta.
        config: The configuration of ``build``.

    Attributes:
        microbatches: Number of micro-batches of a step.
    """

    microbatches: int

    @abstractmethod
    def __init__(self, program: Program, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def split(self, args: Sequence[Any], batch: Mapping[str, Any]) -> list[Batch]:
        """Return the micro-batches of one data-parallel rank's batch, each as arguments of the forward by name."""

    @abstractmethod
    def forward(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        """Run a stage as the engine does; return the tensors it sends, or the loss in the last stage.

        Args:
            program: The program for this micro-batch.
            received: Values of the stage's ``inputs``.
            part: The micro-batch, with ``labels`` where the engine was given ``loss_fn``.
        """
