"""Forward of a pipeline stage in the engine of another project."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import Program, Stage, call_arguments

from .batches.microbatches import Batch
from .label_weights import LabelWeights
from .losses.microbatch_loss import CountedLoss, check_has_gradient, run_stage
from .losses.reductions import LossReduction

__all__ = ["StageForward", "enumerate_micro_batches"]


class StageForward(nn.Module):
    """A stage as an engine calls it, once for each micro-batch in order; it finds its arguments of the batch by name.

    Args:
        loss_of: Computes the loss in the last stage.

    Attributes:
        counted: Reductions of the losses of this step.
    """

    def __init__(self, program: Program, index: int, loss_of: CountedLoss) -> None:
        super().__init__()
        self.stage = program.stages[index].module
        self.is_last = index == len(program.stages) - 1
        self.counted: list[LossReduction] = []
        self._index, self._is_whole = index, len(program.stages) == 1
        self._loss_of = loss_of
        self._planned: list[Stage] = []
        self._names: tuple[str, ...] = ()
        self._weights: LabelWeights | None = None

    def _begin(self, programs: Sequence[Program], weights: LabelWeights | None) -> None:
        """Begin a step; without ``weights`` all micro-batches weigh alike in the loss."""
        self._planned = [each.stages[self._index] for each in programs]
        self.counted, self._weights = [], weights
        self._select(0)

    def _select(self, microbatch: int) -> None:
        self._modules["stage"], self._names = self._planned[microbatch].module, self._planned[microbatch].batch_inputs

    def _run(self, index: int, part: Batch, labels: Any, received: Sequence[torch.Tensor]) -> Any:
        """Run one micro-batch; return its weighted loss in the last stage, in others the values that the next one receives.

        Args:
            received: The values that the stage before gave.
        """
        self._select(index)
        batch = {name: part[name] for name in self._names if name in part}
        if not self.is_last:
            return run_stage(labels, lambda: self.stage(*received, **batch), self._index)
        args, kwargs = call_arguments(self.stage, part) if self._is_whole else (received, batch)
        loss, counted = self._loss_of(lambda: self.stage(*args, **kwargs), labels, self._index)
        check_has_gradient(loss)
        self.counted.append(counted)
        return loss if self._weights is None else self._weights.weight_loss(index, loss, counted)


def enumerate_micro_batches(parts: Sequence[Batch], labels: Sequence[Any]) -> Iterator[tuple[int, Batch, Any]]:
    return iter([*zip(range(len(parts)), parts, labels, strict=True)])
