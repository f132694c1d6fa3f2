"""Losses of micro-batches that depend on the whole batch: the options ``loss_weights`` and ``loss_over``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from slapo_core import Program

from .batches.microbatches import Batch
from .losses.microbatch_loss import MicroBatchLoss
from .losses.replica_loss import ReplicaLoss, SinglePass
from .losses.weighted_terms import LossTerms
from .model.state_rollback import buffer_rollback, state_rollback
from .options.common_options import CommonOptions

__all__ = ["StepLosses"]

Forward = Callable[[list[Any]], None]
"""Function that runs the micro-batches forward in the mode of the step, with losses in the places of labels."""


class StepLosses:
    """Replaces the labels of each micro-batch by its loss, with one of these options.

    Args:
        on_all_ranks: Runs an action, and returns its result only if no rank failed. Collective.
        precision: Function that makes the engine's precision context of ``loss_fn``.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        device: torch.device,
        on_all_ranks: Callable[[Callable[[], Any]], Any],
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._on_all_ranks, self._rows = on_all_ranks, options.batch_rows
        self._replica_loss: ReplicaLoss | None = None
        self._terms: LossTerms | None = None
        if options.loss_over is not None and options.loss_fn is not None:
            self._replica_loss = ReplicaLoss(program, options.loss_fn, device, precision)
        if options.loss_weights is not None:
            own = options.loss_fn, options.ignored_label, device, options.output_loss
            self._terms = LossTerms(options.loss_weights, program, *own)

    @property
    def are_whole(self) -> bool:
        """True if the mean of these losses is the loss of the whole batch, whatever its labels."""
        return self._replica_loss is not None or self._terms is not None

    def count(self, parts: list[Batch]) -> None:
        """Compute the counts of the losses' terms, with no message to other ranks."""
        if self._terms is not None:
            self._terms.count(parts)

    def train(
        self, parts: list[Batch], labels: list[Any], module: nn.Module, forward: Forward, scale: float = 1.0
    ) -> list[Any]:
        """Return the losses of micro-batches in training, or their labels without the options. Collective.

        ``forward`` runs the micro-batches through this rank's stages.

        Raises:
            BuildError: on all ranks, before the step: the outputs do not fit the options.
        """
        if self._terms is not None:
            return self._weighted_losses(self._terms, labels, module, forward, training=True)
        if self._replica_loss is None:
            return labels
        loss, rows = self._replica_loss, self._rows.count(parts[0])
        loss.scale = scale
        if len(parts) == 1:
            return [SinglePass(loss, labels[0], rows)]
        passes = loss.first_passes(len(parts))
        with buffer_rollback(module.modules()):
            forward([*passes])
        return [*self._on_all_ranks(lambda: loss.second_passes(passes, labels, rows))]

    def evaluate(
        self,
        parts: list[Batch],
        labels: list[Any],
        module: nn.Module,
        forward: Forward,
        run: Callable[[list[Any]], torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of an evaluation. Collective.

        ``forward`` runs the micro-batches through this rank's stages; ``run`` does so with losses in the places of labels,
        and returns the mean loss.
        """
        if self._terms is not None:
            return run(self._weighted_losses(self._terms, labels, module, forward, training=False))
        if self._replica_loss is None:
            return run(labels)
        loss = self._replica_loss
        passes = loss.first_passes(len(parts))
        forward([*passes])
        return loss.on_all_ranks(self._on_all_ranks(lambda: loss.evaluate(passes, labels, self._rows.count(parts[0]))))

    def end(self, training: bool) -> None:
        """End a step that succeeded on all ranks. Collective.

        Raises:
            BuildError: on all ranks: counts of ``loss_weights`` differ from the labels of the losses.
        """
        if self._terms is not None:
            self._terms.end(training)

    def _weighted_losses(
        self, terms: LossTerms, labels: list[Any], module: nn.Module, forward: Forward, training: bool
    ) -> list[Any]:
        """Return the losses by ``loss_weights``. Collective."""
        return [*terms.losses(labels, training)]


class CheckedStepLosses(StepLosses):
    """Losses of an engine that cannot continue after an error within a step: an extra forward before it checks the terms."""

    def _weighted_losses(
        self, terms: LossTerms, labels: list[Any], module: nn.Module, forward: Forward, training: bool
    ) -> list[Any]:
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
        return self._loss.run(stage, index)

    def loss(self, output: Any) -> torch.Tensor:
        """Return the loss, or zero after an error."""
        try:
            return self._loss.loss(output).detach()
        except Exception as err:
            self._error = err
            return torch.zeros(())

    def check(self) -> None:
        if self._error is not None:
            raise self._error
