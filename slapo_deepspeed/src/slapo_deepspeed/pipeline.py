"""Stages in DeepSpeed's ``PipelineModule``, one on each rank, and the conversion of their outputs to the tensors it sends."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn

from slapo_core import Boundary, BuildError, Program
from slapo_training.batches import Batch
from slapo_training.engines import tied_groups
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss
from slapo_training.model import TrainingMode
from slapo_training.stage_forward import StageForward, enumerate_micro_batches

from .process_state import _deepspeed_private as private

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _FillGradients(torch.autograd.Function):
    """Autograd node that gives every received tensor a gradient if one of them gets one: DeepSpeed sends all of them back."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def pack(values: Sequence[torch.Tensor], planned: Sequence[Boundary], stage: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors that DeepSpeed sends for the outputs of a stage, whose index is for errors.

    DeepSpeed expects a gradient for every floating-point tensor that it sends, and does not send booleans. Floating-point
    tensors without a gradient are therefore sent as the integers of their bits, and booleans as bytes.

    Raises:
        BuildError: a value has another shape than planned, or its need for a gradient differs from the plan.
    """
    training = torch.is_grad_enabled()
    packed = []
    for value, boundary in zip(values, planned, strict=True):
        wanted = boundary.requires_grad and training
        if tuple(value.shape) != boundary.shape or (value.requires_grad and training) != wanted:
            raise BuildError(
                f"stage {stage} gives {boundary.name!r} with (shape, requires_grad) "
                f"{(tuple(value.shape), value.requires_grad)}, but {(boundary.shape, boundary.requires_grad)} was planned"
            )
        value = torch.view_as_real(value) if value.is_complex() else value
        packed.append(value.contiguous() if wanted else _as_bits(value.detach()))
    return tuple(packed)


def unpack(received: Sequence[torch.Tensor], planned: Sequence[Boundary], low: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the values that ``pack`` converted by the same plan.

    ``low`` is the type of two-byte floating-point values whose planned type has another size.
    """
    training = torch.is_grad_enabled()
    carriers = [index for index, boundary in enumerate(planned) if boundary.requires_grad and training]
    own = dict(zip(carriers, _FillGradients.apply(*(received[index] for index in carriers)), strict=True)) if carriers else {}  # type: ignore[no-untyped-call]
    values = []
    for index, (tensor, boundary) in enumerate(zip(received, planned, strict=True)):
        value = own[index] if index in own else _from_bits(tensor, boundary.dtype, low)
        values.append(torch.view_as_complex(value) if boundary.dtype.is_complex else value)
    return tuple(values)


def _as_bits(value: torch.Tensor) -> torch.Tensor:
    bits = _BITS[value.element_size()] if value.is_floating_point() or value.dtype is torch.bool else value.dtype
    return value.contiguous().view(bits)


def _from_bits(tensor: torch.Tensor, planned: torch.dtype, low: torch.dtype) -> torch.Tensor:
    if planned.is_complex:  # sent as the real numbers
        return tensor.view(torch.float64 if tensor.dtype is torch.int64 else torch.float32)
    if not planned.is_floating_point:
        return tensor.view(planned)
    same = planned.itemsize == tensor.element_size()
    return tensor.view(planned if same else {8: torch.float64, 4: torch.float32, 2: low}[tensor.element_size()])


class RunningStage(StageForward):
    """Stage that DeepSpeed's pipeline calls once for each micro-batch, in order.

    A stage keeps the micro-batches itself and reads them in order, because DeepSpeed passes batches only to the first and the
    last stage. There are as many stages as ranks along pp. ``dtype`` is that of the weights.
    """

    def __init__(self, program: Program, loss_of: CountedLoss, dtype: torch.dtype) -> None:
        super().__init__(program, program.axis_rank("pp"), loss_of)
        self._dtype = dtype
        self._inputs: tuple[Boundary, ...] = ()
        self._outputs: tuple[Boundary, ...] = ()
        self._parts: Iterator[tuple[int, Batch, Any]] = iter(())

    def begin(self, programs: Sequence[Program], parts: list[Batch], labels: list[Any], weights: LabelWeights | None) -> None:
        """Begin a step; without ``weights`` all micro-batches weigh alike in the loss."""
        stages = programs[0].stages
        self._inputs, self._outputs = stages[self._index].inputs, () if self.is_last else stages[self._index + 1].inputs
        self._parts = enumerate_micro_batches(parts, labels)
        self._begin(programs, weights)

    def forward(self, received: Any) -> Any:
        """Run one micro-batch; the first stage ignores ``received``."""
        values = unpack(received, self._inputs, self._dtype) if self._index else ()
        given = self._run(*next(self._parts), values)
        return given if self.is_last else pack(given, self._outputs, self._index)


def in_pipeline(program: Program, stage: RunningStage, modes: TrainingMode) -> Any:
    """Return DeepSpeed's ``PipelineModule`` with one stage on each rank, ``stage`` on this one. Collective."""
    from deepspeed.pipe import LayerSpec

    pp, dp, tp = (program.axis_size(axis) for axis in ("pp", "dp", "tp"))

    class Stages(private.tied_pipeline(tied_groups(program))):  # type: ignore[misc]
        stays_in_training = False

        def train(self, mode: bool = True) -> Any:
            super().train(mode or self.stays_in_training)
            modes.restore_frozen()
            return self

    own = program.axis_rank("pp")
    layers = [stage if index == own else LayerSpec(nn.Identity) for index in range(pp)]
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints these placeholder layers
        topology = private.pipeline_topology(pp, dp, tp)
        return Stages(layers, topology=topology, loss_fn=None, partition_method="uniform")


@contextmanager
def keep_mode(stages: Any, training: bool) -> Iterator[None]:
    """Keep the stages in the given mode inside: DeepSpeed switches to evaluation mode for every forward-only run."""
    stages.stays_in_training = training
    stages.train(training)
    try:
        yield
    finally:
        stages.stays_in_training = False


def steps(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the iterator that DeepSpeed reads as a batch: one pair of placeholders for each micro-batch."""
    nothing = torch.zeros((), dtype=torch.int64)
    return iter([(nothing, nothing)] * number)
