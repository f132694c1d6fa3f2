"""How a rank comes to its optimizer: from a factory or an object, and of whole tensors where an update depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.parameters import is_part, shard_spec
from slapo_core.program import Program
from slapo_training.model_tensors import parameters
from slapo_training.optimizers import keep_types, made, scheduled_rate
from slapo_training.pieces import Piece
from slapo_training.whole_steps.making import Layout, WholeSteps, examined
from slapo_training.whole_steps.probe import Finding

from .model_state import piece
from .updates import MissedSteps


class OptimizerMaking:
    """Makes the optimizer of one rank: ``begin``, ``step_whole`` and ``finish``, on all ranks.

    Args:
        given: A factory, or an optimizer.
        program: The program.
        module: This rank's stages.
        trainable: What the factory gets; nothing on a rank that has nothing to train or has its optimizer.
        is_adopted: Whether an optimizer that was given has this rank's parameters already.

    Attributes:
        optimizer: What was made; None where there is nothing to train.
        rate: The schedule of its learning rate, or None.
    """

    def __init__(
        self, given: Any, program: Program, module: nn.Module, trainable: Sequence[nn.Parameter], is_adopted: bool
    ) -> None:
        self._given, self._program, self._module, self._trainable = given, program, module, list(trainable)
        self._is_object = isinstance(given, torch.optim.Optimizer)
        self._is_adopted = is_adopted and self._is_object
        self._layout = Layout(program, parameters(module), _piece, _holders)
        self._finding: Finding | None = None
        self._whole: WholeSteps | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.rate: Any = None

    def begin(self) -> None:
        """Make an optimizer of the rank's parameters, and find out what its updates depend on; touches no other rank."""
        if self._trainable:
            self.optimizer = self._given if self._is_adopted else self._made(self._trainable)
            self._finding = examined(self.optimizer, self._layout)

    def step_whole(self) -> None:
        """Prepare whole tensors where the optimizer needs them. Collective.

        Raises:
            BuildError: on every rank: its updates cannot be right on this layout.
        """
        self._whole = WholeSteps(self.optimizer, self._finding, self._layout)

    def finish(self, rate: Any, missed: MissedSteps) -> None:
        """Make the optimizer of whole tensors, if it is one, and the schedule of its rate; touches no other rank.

        Args:
            rate: A schedule of the learning rate, a factory of one, or None.
            missed: Steps that the schedule is to make up for.
        """
        if self.optimizer is None:
            return
        keep_types(self.optimizer)
        if self._whole is not None and self._whole.is_needed:
            make: Callable[[list[nn.Parameter]], Any] | None = None if self._is_object else self._given
            self.optimizer = self._whole.optimizer(self.optimizer, make, self._trainable)
            if make is not None:
                keep_types(self.optimizer.inner)
        if rate is not None:
            self.rate = scheduled_rate(rate, self.optimizer)
            missed.catch_up(self.rate)

    def _made(self, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
        return made(self._given, trainable, self._program.module, self._module)


def _piece(parameter: nn.Parameter) -> Piece:
    return piece(parameter, parameter)


def _holders(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that together have the whole parameter."""
    spec = shard_spec(parameter)
    return spec.group if spec is not None and is_part(parameter) else None
