"""One call of a stage: precision, tensors sent to the next stage, and the loss of the last stage with its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import Boundary, BuildError, Stage, call_arguments
from slapo_training.first_step import scaled_gradient
from slapo_training.losses import (
    EQUAL_PARTS,
    UNKNOWN_REDUCTION,
    CombinedMeans,
    CountedLoss,
    LabelMean,
    LossReduction,
    MicroBatchLoss,
    is_label_mean,
    run_stage,
)
from slapo_training.model import is_wrapper_subclass
from slapo_training.options import CommonOptions

from ..gradients._torch_private import storage_key

LABELS_CHANGED = f"the model injects gradients, and its loss is a mean over other labels than the batch shows; {EQUAL_PARTS}"
"""Message of the error after a step with losses weighted by wrong numbers of labels."""


class LabelCount:
    """Estimated number of labels of a micro-batch: the number of the step before, so that most steps need no correction.

    Attributes:
        value: Equal on all ranks; 0 before the first step.
    """

    value: float = 0.0

    def state(self) -> float:
        """Return the state for a checkpoint; with it, later steps round as without the checkpoint."""
        return self.value

    def restore(self, state: float) -> None:
        self.value = state


class MicroBatchWeight(NamedTuple):
    """Weight of each micro-batch's loss in the loss of the batch.

    A loss over n labels is multiplied by ``n / (parts * unit)``. At the end of the step, gradients are multiplied by
    ``parts * unit / N``, with N the number of all labels. If the reduction is unknown, all losses are divided by ``parts``.

    Args:
        parts: Number of micro-batches of each replica.
        unit: Estimated number of labels of a micro-batch, equal on all ranks.
        differs: True if micro-batches or ranks have different numbers of labels, so that reductions must be known.
        scale: Loss scale of fp16, which multiplies all weights.
        is_single: True if no rank has another micro-batch.
        injects: True if the model injects gradients. Injected gradients are not divided by ``parts``; so gradients of losses
            are multiplied by ``parts``, and gradients of parameters are divided by it at the end of the step.
    """

    parts: int
    unit: float = 1.0
    differs: bool = False
    scale: float = 1.0
    is_single: bool = False
    injects: bool = False

    def weight_loss(self, loss: torch.Tensor, reduction: LossReduction) -> torch.Tensor:
        """Return the weighted loss of a micro-batch, given its reduction over labels."""
        return scaled_gradient(self._value(loss, reduction), self.parts if self.injects else 1.0)

    def _value(self, loss: torch.Tensor, reduction: LossReduction) -> torch.Tensor:
        if not isinstance(reduction, LabelMean) or reduction.labels == self.unit:
            return loss * self.scale / self.parts if self.scale != 1.0 else loss / self.parts
        known = loss if reduction.labels else loss.nan_to_num()  # a mean over no labels is NaN
        return known * (self.scale * reduction.labels / (self.parts * self.unit))

    def batch_mean(
        self, total: float | torch.Tensor, labels: float | None, dp: int
    ) -> tuple[float | torch.Tensor, float, float]:
        """Return the loss of a batch, of the type of ``total``, the remaining factor of its gradients, and the next ``unit``.

        Args:
            labels: Number of labels of all micro-batches; None if the losses are not means over labels.

        Raises:
            BuildError: the model injects gradients, and the batch has other labels than the loss.
        """
        scale = self.scale * (self.parts if self.injects else 1)
        if labels is None:
            return total / dp / self.scale, 1.0 / scale, self.unit
        unit = labels / (self.parts * dp)
        if self.injects and unit != self.unit:
            raise BuildError(LABELS_CHANGED)
        factor = self.unit / unit if labels else 1.0
        return (total / dp * factor / self.scale if labels else float("nan")), factor / scale, unit


def reduction_sums(reductions: Sequence[LossReduction]) -> list[float]:
    """Return one rank's reductions as numbers; ``total_labels`` reads their sums over ranks."""
    counts = [each.labels for each in reductions if isinstance(each, LabelMean)]
    combined = [each.fingerprint for each in reductions if isinstance(each, CombinedMeans)]
    return [sum(counts), len(counts), len(reductions), len(combined), sum(combined), sum(each**2 for each in combined)]


def total_labels(numbers: Sequence[float]) -> float | None:
    """Return the number of labels of all losses, from summed ``reduction_sums``; None if losses are not means over labels.

    Raises:
        BuildError: some losses only are means over labels, or losses combine means over different numbers of labels.
    """
    labels, means, losses, combined, total, squares = numbers
    if means not in (0, losses):
        raise BuildError("the labels that the loss averages over are known for some micro-batches only; " + EQUAL_PARTS)
    if combined * squares != total * total:  # Cauchy-Schwarz: the fingerprints are not all equal
        raise BuildError(UNKNOWN_REDUCTION)
    return labels if means else None


class StageCall(nn.Module):
    """A stage as a pipeline runtime calls it: received tensors in, a tuple of tensors or the loss out.

    ``outputs`` are the tensors that the next stage receives; None for the last stage, which returns its weighted loss.
    """

    def __init__(self, stage: Stage, outputs: tuple[Boundary, ...] | None, options: CommonOptions, device_type: str) -> None:
        super().__init__()
        self.module = stage.module
        self.inputs = stage.inputs
        self.outputs = outputs
        self.weight = MicroBatchWeight(options.microbatches)
        self.counted: list[LossReduction] = []
        self._index = stage.index
        self._options = options
        self._device_type = device_type
        self._loss_of = CountedLoss(options.loss_fn, options.output_loss)

    def begin(self, weight: MicroBatchWeight, counted: list[LossReduction] | None = None) -> list[LossReduction]:
        """Begin a step; return the list, ``counted`` or a new one, that collects the reduction of each micro-batch's loss."""
        self.weight, self.counted = weight, [] if counted is None else counted
        return self.counted

    def forward(
        self, *received: torch.Tensor, batch: Mapping[str, Any], labels: Any = None, call: StageCall | None = None
    ) -> Any:
        """Run one micro-batch, on the stage's ``inputs`` and the batch's arguments that it reads.

        ``call`` is the stage call of this micro-batch, if it is another one. The last stage reads ``labels``.
        """
        if call is not None and call is not self:
            return call(*received, batch=batch, labels=labels)
        with autocast_context(self._options, self._device_type):
            if self.outputs is None:
                return self._loss(batch, labels, *received)
            return self._prepare_outputs(run_stage(labels, lambda: self._run(received, batch), self._index))

    def _loss(self, batch: Mapping[str, Any], labels: Any, *received: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's weighted loss; a leaf if no trained parameter is in it, so that backward does nothing."""
        loss = self._weighted_loss(batch, labels, *received)
        return loss if loss.requires_grad or not torch.is_grad_enabled() else loss.detach().requires_grad_()

    def _weighted_loss(self, batch: Mapping[str, Any], labels: Any, *received: torch.Tensor) -> torch.Tensor:
        if self.weight.is_single and not isinstance(labels, MicroBatchLoss):  # its reduction does not matter
            return self.weight.weight_loss(self._loss_of.loss_only(lambda: self._run(received, batch), labels), None)
        kind = frozenset(name for name, value in batch.items() if value is not None)
        loss, reduction = self._loss_of(lambda: self._run(received, batch), labels, self._index, kind)
        self.counted.append(reduction)
        if self.weight.differs and not is_label_mean(reduction):
            raise BuildError(UNKNOWN_REDUCTION)
        return self.weight.weight_loss(loss, reduction)

    def _run(self, received: tuple[torch.Tensor, ...], batch: Mapping[str, Any]) -> Any:
        if self.inputs or self.outputs is not None:
            return self.module(*received, **batch)
        args, kwargs = call_arguments(self.module, batch)
        return self.module(*args, **kwargs)

    def _prepare_outputs(self, result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert self.outputs is not None
        training = torch.is_grad_enabled()
        for tensor, boundary in zip(result, self.outputs, strict=True):
            real = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad and training)
            planned = (boundary.shape, boundary.dtype, boundary.requires_grad and training)
            if real != planned:  # a missing gradient would otherwise be lost silently
                what = "(shape, dtype, requires_grad)"
                raise BuildError(f"stage {self._index} gives {boundary.name!r} with {what} {real}, but {planned} was planned")
        tables = [table.values() for each in self.module.modules() for table in (each._parameters, each._buffers) if table]
        held = {
            storage_key(tensor)
            for table in tables
            for tensor in table
            if tensor is not None and not is_wrapper_subclass(tensor)
        }
        # copy a module's own memory, which later micro-batches may change before the send
        return tuple(
            tensor.contiguous()
            if tensor.requires_grad and storage_key(tensor) not in held
            else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in result
        )


def autocast_context(options: CommonOptions, device_type: str) -> torch.autocast:
    """Return the autocast context of an engine's precision."""
    dtype = torch.float16 if options.precision == "fp16" else torch.bfloat16
    return torch.autocast(device_type, dtype=dtype, enabled=options.precision != "fp32")
