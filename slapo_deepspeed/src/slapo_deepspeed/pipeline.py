"""Stages in DeepSpeed's ``PipelineModule``, one on each rank."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn

from slapo_core import Boundary, Program
from slapo_training.batches import Batch
from slapo_training.engines import tied_groups
from slapo_training.label_weights import LabelWeights
from slapo_training.losses import CountedLoss
from slapo_training.model import TrainingMode
from slapo_training.stage_forward import StageForward, enumerate_micro_batches

from .boundary_packing import pack, unpack
from .process_state import _deepspeed_private as private


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
