"""``StepLosses`` for engines that cannot continue after an error within a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .losses.microbatch_loss import MicroBatchLoss
from .losses.weighted_terms import LossTerms
from .model.state_rollback import state_rollback
from .step_losses import Forward, StepLosses


class BatchLosses(StepLosses):
    """Checks the terms of losses by an extra forward before the step."""

    def _weighted_losses(
        self, terms: LossTerms, labels: list[Any], module: nn.Module, forward: Forward, training: bool
    ) -> list[Any]:
        """Return the losses by ``loss_weights``. Collective.

        Raises:
            BuildError: on all ranks: the terms do not fit the option.
        """
        if not terms.is_checked(training):
            trials = [_DeferredErrorLoss(each) for each in terms.losses(labels, training)]
            with state_rollback(module.modules()):
                forward([*trials])

            def check() -> None:
                for each in trials:
                    each.check()

            self._on_all_ranks(check)
            terms.end(training)
        return super()._weighted_losses(terms, labels, module, forward, training)


class _DeferredErrorLoss(MicroBatchLoss):
    """Loss of a micro-batch whose error is deferred until ``check``."""

    def __init__(self, loss: MicroBatchLoss) -> None:
        self._loss = loss
        self._error: Exception | None = None

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run a stage."""
        return self._loss.run(stage, index)

    def loss(self, output: Any) -> torch.Tensor:
        """Return the loss, or zero after an error."""
        try:
            return self._loss.loss(output).detach()
        except Exception as err:
            self._error = err
            return torch.zeros(())

    def check(self) -> None:
        """Raise the deferred error, if any.

        Raises:
            Exception: the terms could not be computed.
        """
        if self._error is not None:
            raise self._error
