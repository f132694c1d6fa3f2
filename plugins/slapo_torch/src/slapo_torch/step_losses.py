"""The losses of a step's micro-batches that follow from all of them: ``loss_weights`` and ``loss_over``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core.program import Program
from slapo_training.batches import Batch, rows_of
from slapo_training.loss_terms import LossTerms
from slapo_training.replica_loss import ReplicaLoss, buffers_kept

from .options import Options
from .stage_call import precision


class StepLosses:
    """What takes the place of labels where the micro-batches' losses follow from all of them.

    Args:
        program: What runs.
        options: Of the engine.
        device: Of this rank.

    Attributes:
        over: With ``loss_over``, the loss of all replicas; else None.
        are_whole: Whether the mean of these losses is that of the whole batch, whatever labels it has.
    """

    def __init__(self, program: Program, options: Options, device: torch.device) -> None:
        self.over: ReplicaLoss | None = None
        self._terms: LossTerms | None = None
        if options.loss_over is not None and options.loss_fn is not None:
            self.over = ReplicaLoss(program, options.loss_fn, device, partial(precision, options, device.type))
        if options.loss_weights is not None:
            self._terms = LossTerms(options.loss_weights, program, options.loss_fn, options.ignored_label, device)
        self.are_whole = self.over is not None or self._terms is not None

    def count(self, parts: list[Batch]) -> None:
        """Count what the losses of micro-batches are means over; touches no other rank."""
        if self._terms is not None:
            self._terms.count(parts)

    def begin(
        self,
        parts: list[Batch],
        labels: list[Any],
        training: bool,
        scale: float,
        module: nn.Module,
        forward: Callable[[list[Any]], None],
        together: Callable[[Callable[[], Any]], Any],
    ) -> list[Any]:
        """Return what micro-batches are given in the place of labels. Collective.

        Args:
            parts: The micro-batches.
            labels: Theirs.
            training: Whether they are trained.
            scale: What the loss is multiplied by, with fp16.
            module: This rank's stages.
            forward: Runs the micro-batches forward in training, with these in the place of labels.
            together: Does on all ranks what may fail on one.
        """
        if self._terms is not None:
            return [*self._terms.losses(labels, training)]
        if self.over is None:
            return labels
        over, rows = self.over, rows_of(parts[0])
        over.scale = scale
        if len(parts) == 1:
            return [over.only_run(labels[0], rows)]
        runs = over.first_runs(len(parts))
        with buffers_kept(module):
            forward([*runs])
        return [*together(lambda: over.second_runs(runs, labels, rows))]

    def end(self, training: bool) -> None:
        """End a step that went well on all ranks. Collective."""
        if self._terms is not None:
            self._terms.end(training)
