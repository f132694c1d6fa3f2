"""Steps of a stage on fake tensors with the tensors that an engine keeps and allocates by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core import Boundary, SlapoError, Stage, get_logger
from slapo_tracing.recording import Sandbox
from slapo_training import StageMemory

from ..recording.run_recorder import RunRecorder
from ..recording.segments import PassRecord, RepeatedBlocks, SegmentMarks
from ..recording.storage_tracker import storage_bytes
from ..records import CollectiveRecord
from .repeated_blocks import BlockRun, BlocksNotRunError, block_runs, trimmed_runs
from .stage_record import StageRecord
from .stage_run import StageForward

EngineMemory = Callable[[nn.Module], StageMemory]
"""Makes the engine's own tensors for a module with fake tensors."""


def run_engine_stage(
    stage: Stage, part: Mapping[str, Any], forward: StageForward, engine: EngineMemory, microbatches: int
) -> StageRecord:
    """Run a step of a stage on fake tensors; the model does not change.

    Of many micro-batches the first two and the last run. Equal blocks all run if the engine's work depends on the order of
    gradients, as buckets span the blocks.

    Args:
        stage: The stage; its weights may be on meta.
        part: Arguments of one micro-batch, with labels; real tensors.
        forward: Calls the stage as its engine does.
        engine: Makes the engine's own tensors.
        microbatches: Number of micro-batches of a step.
    """
    try:
        return _run(stage, part, forward, engine, microbatches, block_runs(stage.module))
    except SlapoError:
        raise
    except Exception as err:  # e.g. the code takes the output of a block by its number
        get_logger().debug("a stage runs again with all its blocks: %s", err)
    return _run(stage, part, forward, engine, microbatches, [])


def _run(
    stage: Stage, part: Mapping[str, Any], forward: StageForward, engine: EngineMemory, microbatches: int, runs: list[BlockRun]
) -> StageRecord:
    sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        sandbox.keep_schedule_hooks()
        weights = [each.data for each in stage.module.parameters()]
        memory = engine(stage.module)
        everything = _EngineRun(stage, part, forward, sandbox, memory)
        everything.begin_count(weights)
        with memory.run_context(), trimmed_runs(runs if memory.repeats_blocks else []):
            everything.bind_blocks(runs if memory.repeats_blocks else [])
            return everything.record(min(microbatches, 3))


class _EngineRun:
    def __init__(
        self, stage: Stage, part: Mapping[str, Any], forward: StageForward, sandbox: Sandbox, memory: StageMemory
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox, self.memory = stage, part, forward, sandbox, memory
        self.recorder = RunRecorder()
        self.parameters = [*stage.module.parameters()]
        self.marks = SegmentMarks(self.recorder, {})
        self.repeated: list[RepeatedBlocks] = []
        self.dropped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.received = self.sent = self.sent_back = 0

    def begin_count(self, weights: list[torch.Tensor]) -> None:
        """Count the tensors that exist before the step.

        Args:
            weights: Data of the parameters without the engine.
        """
        tracker = self.recorder.memory
        if self.memory.owns_parameters:
            tracker.ignore(weights)
        else:
            tracker.add(self.parameters)
        tracker.add([[*self.stage.module.buffers()], [*self.part.values()]])

    def bind_blocks(self, runs: list[BlockRun]) -> None:
        """Take the blocks that run, and the parameters of those that do not, each with the one that stands for it."""
        paths = {id(module): path for path, module in self.stage.module.named_modules()}
        self.repeated = [run.repeated_blocks(paths) for run in runs if run.num_dropped]
        for run in runs:
            for block, measured in zip(run.dropped_blocks, cycle(run.measured_blocks)):
                self.dropped += zip(block.parameters(), measured.parameters(), strict=True)
        self.marks = SegmentMarks(self.recorder, {paths[id(block)]: block for run in runs for block in run.kept_blocks})

    def record(self, count: int) -> StageRecord:
        memory = self.memory
        held = {kind: self._count(tensors) for kind, tensors in memory.held().items()}
        with self.sandbox.observed_by(self.recorder):
            begin = self._measure(memory.begin_step)
        if memory.records_order:
            self._run_microbatch(is_last=False)
            memory.end_recording()
        memory.collectives.clear()
        passes = [self._run_microbatch(is_last=index + 1 == count) for index in range(count)]
        with self.sandbox.observed_by(self.recorder):
            step = self._measure(memory.step)
        nothing, own = PassRecord(), held.pop("parameters", 0)
        return StageRecord(
            begin=nothing,
            forward=passes[0][0],
            first_backward=passes[0][1],
            next_backward=passes[1 % count][1],
            inputs_backward=None,
            first_weights=nothing,
            next_weights=nothing,
            end=nothing,
            optimizer=nothing,
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=own if memory.owns_parameters else storage_bytes(self.parameters),
            buffers=storage_bytes(self.stage.module.buffers()),
            gradients=0,
            numbers=sum(each.numel() for each in self.parameters),
            microbatches=tuple(passes),
            step=step,
            held=held,
            freed=-begin.change,
        )

    def _count(self, tensors: Any) -> int:
        before = self.recorder.memory.live
        self.recorder.memory.add(tensors)
        return self.recorder.memory.live - before

    def _run_microbatch(self, is_last: bool) -> tuple[PassRecord, PassRecord]:
        received = tuple(map(self._receive_buffer, self.stage.inputs))
        self.recorder.memory.add(received)
        self.received = storage_bytes(received)
        made: list[Any] = []
        with self.sandbox.observed_by(self.recorder):
            forward = self._measure_blocks(lambda: made.append(self.forward(received, self.part)), is_forward=True)
            outputs = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
            trained = [each for each in outputs if each.requires_grad]
            gradients: list[torch.Tensor] | None = None
            if not (len(outputs) == 1 and outputs[0].dim() == 0):  # the loss has no gradient that another stage sends
                self.sent = storage_bytes(outputs)
                gradients = [torch.empty_like(each) for each in trained]
            del outputs
            made.clear()
            self.memory.begin_backward(is_last)
            backward = self._measure_blocks(lambda: self._run_backward(trained, gradients))
            self._add_dropped_gradients()
            backward = PassRecord.join([backward, self._measure(lambda: self.memory.end_backward(is_last))])
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return forward, PassRecord(backward.peak, backward.change - self.sent_back, backward.work)

    def _run_backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None) -> None:
        if outputs:
            torch.autograd.backward(outputs, gradients)
        outputs.clear()

    def _add_dropped_gradients(self) -> None:
        """Allocate the gradients of blocks that did not run, which the record of the one that stands for them counts."""
        for parameter, measured in self.dropped:
            if measured.grad is not None and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)

    def _receive_buffer(self, boundary: Boundary) -> torch.Tensor:
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        return self.sandbox.fake_of(tensor).requires_grad_(boundary.requires_grad)

    def _measure_blocks(self, run: Callable[[], Any], is_forward: bool = False) -> PassRecord:
        with self.marks:
            segments = self.marks.measure(run)
        if is_forward:
            BlocksNotRunError.check(
                (path for each in self.repeated for path in each.paths), {name for name, _ in segments.parts}
            )
        found = segments.whole(self.repeated)
        return PassRecord(found.peak, found.change, (*found.work, *self._take_collectives()))

    def _take_collectives(self) -> tuple[CollectiveRecord, ...]:
        collectives = tuple(self.memory.collectives)
        self.memory.collectives.clear()
        return collectives

    def _measure(self, run: Callable[[], Any]) -> PassRecord:
        memory = self.recorder.memory
        before = memory.live
        memory.begin_segment()
        self.recorder.take_work()
        run()
        work = (*self.recorder.take_work(), *self._take_collectives())
        return PassRecord(memory.peak - before, memory.live - before, work)
