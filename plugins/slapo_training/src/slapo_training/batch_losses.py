"""The losses of a batch's micro-batches that follow from all of them, for engines that sum gradients while a batch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slapo_core.program import Program

from .batches import Batch, rows_of
from .loss_terms import LossTerms
from .losses import MicroBatchLoss
from .meeting import on_all
from .options import CommonOptions
from .replica_loss import ReplicaLoss, buffers_kept, draws_kept

Forward = Callable[[list[Any], bool], None]
"""Runs the micro-batches forward alone, with these in the place of labels, in training or in evaluation mode."""


class BatchLosses:
    """What takes the place of labels with the options ``loss_weights`` and ``loss_over``.

    Args:
        program: What runs.
        options: Of the engine.
        device: Of this rank.
    """

    def __init__(self, program: Program, options: CommonOptions, device: torch.device) -> None:
        self._program = program
        self._over: ReplicaLoss | None = None
        self._terms: LossTerms | None = None
        if options.loss_over is not None and options.loss_fn is not None:
            self._over = ReplicaLoss(program, options.loss_fn, device)
        if options.loss_weights is not None:
            self._terms = LossTerms(options.loss_weights, program, options.loss_fn, options.ignored_label, device)

    @property
    def are_whole(self) -> bool:
        """Whether the mean of these losses is that of the whole batch, whatever labels it has."""
        return self._over is not None or self._terms is not None

    def count(self, parts: list[Batch]) -> None:
        """Count what the losses of micro-batches are means over; touches no other rank."""
        if self._terms is not None:
            self._terms.count(parts)

    def begin(self, parts: list[Batch], labels: list[Any], module: nn.Module, forward: Forward) -> list[Any]:
        """Return what micro-batches that train are given in the place of labels. Collective.

        Raises:
            BuildError: on all ranks, before the step: the outputs are not as the options say.
        """
        if self._terms is not None:
            self._look(labels, module, forward, training=True)
            return [*self._terms.losses(labels, True)]
        if self._over is None:
            return labels
        over, rows = self._over, rows_of(parts[0])
        if len(parts) == 1:
            return [over.only_run(labels[0], rows)]
        runs = over.first_runs(len(parts))
        with buffers_kept(module):
            forward([*runs], True)
        made: list[MicroBatchLoss] = []
        on_all(lambda: made.extend(over.second_runs(runs, labels, rows)), self._program)
        return [*made]

    def evaluate(
        self,
        parts: list[Batch],
        labels: list[Any],
        module: nn.Module,
        forward: Forward,
        run: Callable[[list[Any]], torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of an evaluation. Collective.

        Args:
            parts: The micro-batches.
            labels: Theirs.
            module: This rank's stages.
            forward: Runs them.
            run: Gives the mean of their losses, with these in the place of labels.
        """
        if self._terms is not None:
            self._look(labels, module, forward, training=False)
            return run([*self._terms.losses(labels, False)])
        if self._over is None:
            return run(labels)
        over, runs, found = self._over, self._over.first_runs(len(parts)), [torch.zeros(())]
        forward([*runs], False)
        on_all(lambda: found.append(over.evaluated(runs, labels, rows_of(parts[0]))), self._program)
        return over.shared(found[-1])

    def _look(self, labels: list[Any], module: nn.Module, forward: Forward, training: bool) -> None:
        """Compare the terms with what they are said to be, by a run of its own: an error within a step ends the engine."""
        assert self._terms is not None
        if self._terms.is_checked(training):
            return
        looks = [_Look(each) for each in self._terms.losses(labels, training)]
        with buffers_kept(module), draws_kept():
            forward([*looks], training)

        def tell() -> None:
            for error in (look.error for look in looks if look.error is not None):
                raise error

        on_all(tell, self._program)
        self._terms.end(training)


class _Look(MicroBatchLoss):
    """Computes the loss of a micro-batch and keeps the error."""

    def __init__(self, of: MicroBatchLoss) -> None:
        self._of = of
        self.error: Exception | None = None

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run a stage."""
        return self._of.run(stage, index)

    def loss(self, output: Any) -> torch.Tensor:
        """Return the loss, or a zero."""
        try:
            return self._of.loss(output).detach()
        except Exception as err:
            self.error = err
            return torch.zeros(())
