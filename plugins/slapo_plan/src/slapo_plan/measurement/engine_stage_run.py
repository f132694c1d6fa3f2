"""Steps of a stage on fake tensors with the tensors that an engine keeps and allocates by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo_core import Stage
from slapo_tracing.recording import Sandbox
from slapo_training import StageMemory

from .run_recorder import RunRecorder
from .segments import PassRecord, Segments
from .stage_run import StageForward, StageRecord, StageRun

EngineMemory = Callable[[nn.Module], StageMemory]
"""Makes the engine's own tensors for a module with fake tensors."""


def run_engine_stage(
    stage: Stage, part: Mapping[str, Any], forward: StageForward, engine: EngineMemory, microbatches: int
) -> StageRecord:
    """Run a step of a stage on fake tensors; the model does not change.

    Of many micro-batches the first two and the last run. Repeated blocks all run, since flat tensors and buckets span them.

    Args:
        stage: The stage; its weights may be on meta.
        part: Arguments of one micro-batch, with labels; real tensors.
        forward: Calls the stage as its engine does.
        engine: Makes the engine's own tensors.
        microbatches: Number of micro-batches of a step.
    """
    sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        memory = engine(stage.module)
        recorder = RunRecorder()
        if memory.owns_parameters:
            recorder.memory.ignore(stage.module.parameters())
        return _EngineRun(stage, part, forward, sandbox, memory, recorder).record_step(min(microbatches, 3))


class _EngineRun(StageRun):
    def __init__(
        self,
        stage: Stage,
        part: Mapping[str, Any],
        forward: StageForward,
        sandbox: Sandbox,
        memory: StageMemory,
        recorder: RunRecorder,
    ) -> None:
        super().__init__(stage, part, forward, sandbox, [], recorder)
        self.memory, self._is_last = memory, False

    def record_step(self, count: int) -> StageRecord:
        memory = self.memory
        held = {kind: self._count(tensors) for kind, tensors in memory.held().items()}
        with self.recorder:
            begin = self.marks.measure(memory.begin_step).whole()
        if memory.records_order:
            self.run_microbatch()
            memory.end_recording()
        passes = [self._run(index + 1 == count) for index in range(count)]
        with self.recorder:
            step = self.marks.measure(memory.step).whole()
        record = self.summary(passes[0], passes[1 % count])
        parameters = held.pop("parameters", 0) if memory.owns_parameters else record.parameters
        last = self.without_sent(passes[-1][1])
        return replace(record, parameters=parameters, last_backward=last, step=step, held=held, freed=-begin.change)

    def _run(self, is_last: bool) -> tuple[Segments, Segments]:
        self._is_last = is_last
        return self.run_microbatch()

    def run_backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None) -> None:
        self.memory.begin_backward(self._is_last)
        super().run_backward(outputs, gradients)
        self.memory.end_backward(self._is_last)

    def summary(self, first: tuple[Segments, Segments], second: tuple[Segments, Segments]) -> StageRecord:
        """Return the record of two micro-batches; gradients and optimizer are the engine's."""
        parameters = self.sizes_of_parameters()
        return StageRecord(
            forward=first[0].whole(),
            first_backward=self.without_sent(first[1]),
            next_backward=self.without_sent(second[1]),
            optimizer=PassRecord(),
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=parameters[0],
            buffers=self.size_of_buffers(),
            gradients=0,
            numbers=parameters[1],
        )

    def _count(self, tensors: Any) -> int:
        before = self.recorder.memory.live
        self.recorder.memory.add(tensors)
        return self.recorder.memory.live - before
