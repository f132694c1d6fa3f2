"""One call of a stage: precision, tensors sent to the next stage, and the loss of the last stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_core import Boundary, BuildError, Stage, call_arguments
from slapo_training.losses import UNKNOWN_REDUCTION, CountedLoss, LossReduction, MicroBatchLoss, is_label_mean, run_stage
from slapo_training.model import is_wrapper_subclass
from slapo_training.options import CommonOptions

from .microbatch_weights import MicroBatchWeight


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
            _storage(tensor) for table in tables for tensor in table if tensor is not None and not is_wrapper_subclass(tensor)
        }
        # copy a module's own memory, which later micro-batches may change before the send
        return tuple(
            tensor.contiguous()
            if tensor.requires_grad and _storage(tensor) not in held
            else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in result
        )


def autocast_context(options: CommonOptions, device_type: str) -> torch.autocast:
    """Return the autocast context of an engine's precision."""
    dtype = torch.float16 if options.precision == "fp16" else torch.bfloat16
    return torch.autocast(device_type, dtype=dtype, enabled=options.precision != "fp32")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
