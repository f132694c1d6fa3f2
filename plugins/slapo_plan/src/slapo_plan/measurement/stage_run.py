"""One micro-batch through one stage on fake tensors: what its forward and its backward allocate, compute and send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slapo_core import Stage
from slapo_tracing.recording import Sandbox
from slapo_training import StageMemory

from ..records import Work
from .run_recorder import RunRecorder
from .storage_tracker import storage_bytes

StageForward = Callable[[tuple[torch.Tensor, ...], Mapping[str, Any]], Any]
"""Runs the stage on its received tensors and its arguments of the batch; returns its outputs, or the loss."""
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
EngineMemory = Callable[[torch.nn.Module, OptimizerFactory | None], StageMemory | None]


@dataclass(frozen=True)
class PassRecord:
    """One forward or backward of one micro-batch, or one step of the optimizer.

    Args:
        peak: Most bytes during the pass beyond those at its start.
        change: Bytes at its end beyond those at its start; negative in a backward that frees activations.
        work: Operators and collectives, in order.
    """

    peak: int = 0
    change: int = 0
    work: tuple[Work, ...] = ()


@dataclass(frozen=True)
class StageRecord:
    """One micro-batch through one stage on one rank.

    Args:
        forward: The forward, until its outputs are there.
        first_backward: The backward that allocates the gradients of parameters, without the gradients that it sends.
        next_backward: A backward that adds to them, alike.
        optimizer: The first step of the optimizer, which allocates its state.
        received: Bytes of the tensors that the stage receives.
        sent: Bytes of its outputs; 0 in the last stage.
        sent_back: Bytes of the gradients of received tensors.
        parameters: Bytes of parameters.
        buffers: Bytes of buffers.
        gradients: Bytes of the gradients of parameters.
        numbers: Number of elements of parameters.
        last_backward: The backward of a step's last micro-batch, with the reductions that follow it; None if it is like others.
        step: A step of the optimizer whose state exists; None if ``optimizer`` tells it.
        held: Bytes of the engine's own tensors between steps, by kind.
        freed: Bytes of them that are freed as a step begins.
    """

    forward: PassRecord
    first_backward: PassRecord
    next_backward: PassRecord
    optimizer: PassRecord
    received: int
    sent: int
    sent_back: int
    parameters: int
    buffers: int
    gradients: int
    numbers: int
    last_backward: PassRecord | None = None
    step: PassRecord | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    freed: int = 0


def run_stage(
    stage: Stage,
    part: Mapping[str, Any],
    forward: StageForward,
    optimizer: OptimizerFactory | None = None,
    engine: EngineMemory | None = None,
    microbatches: int = 1,
) -> StageRecord:
    """Run two micro-batches through a stage on fake tensors, and one step of the optimizer; the model does not change.

    Values that depend on the batch alone are real, so that models decide by them as in training.

    Args:
        stage: The stage; its weights may be on meta.
        part: Arguments of one micro-batch, with labels; real tensors.
        forward: Calls the stage as its engine does.
        optimizer: Makes the optimizer; None for a stage that is not stepped.
        engine: Makes the engine's own tensors; it gets the module and ``optimizer``.
        microbatches: Number of micro-batches of a step, for engines with their own tensors.
    """
    sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        memory = engine(stage.module, optimizer) if engine is not None else None
        run = _StageRun(stage, part, forward, sandbox, memory is not None and memory.owns_parameters)
        if memory is not None:
            return run.run_step(memory, microbatches)
        first, second = run.run_microbatch(), run.run_microbatch()
        return run.record(first, second, run.step(optimizer))


class _StageRun:
    def __init__(
        self, stage: Stage, part: Mapping[str, Any], forward: StageForward, sandbox: Sandbox, ignores_parameters: bool
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox = stage, part, forward, sandbox
        self.recorder = RunRecorder()
        self.parameters = [*stage.module.parameters()]
        self.buffers = [*stage.module.buffers()]
        if ignores_parameters:
            self.recorder.memory.ignore(self.parameters)
        self.recorder.memory.add([self.parameters, self.buffers, [*part.values()]])
        self.received = self.sent = self.sent_back = 0

    def run_step(self, memory: StageMemory, microbatches: int) -> StageRecord:
        """Run a step with the engine's own tensors; of many micro-batches the first two and the last run."""
        held = {kind: self._count(tensors) for kind, tensors in memory.held().items()}
        with self.recorder:
            begin = self._measure(memory.begin_step)
        if memory.records_order:
            self.run_microbatch(memory)
            memory.end_recording()
        count = min(microbatches, 3)
        passes = [self.run_microbatch(memory, is_last=index + 1 == count) for index in range(count)]
        with self.recorder:
            step = self._measure(memory.step)
        record = self.record(passes[0], passes[1 % count], PassRecord())
        if memory.owns_parameters:
            record = replace(record, parameters=held.pop("parameters", 0))
        return replace(record, last_backward=passes[-1][1], step=step, held=held, freed=-begin.change, gradients=0)

    def _count(self, tensors: Any) -> int:
        before = self.recorder.memory.live
        self.recorder.memory.add(tensors)
        return self.recorder.memory.live - before

    def run_microbatch(self, memory: StageMemory | None = None, is_last: bool = False) -> tuple[PassRecord, PassRecord]:
        received = tuple(map(self._received, self.stage.inputs))
        self.recorder.memory.add(received)
        self.received = storage_bytes(received)
        held: list[Any] = []
        with self.recorder:
            forward = self._measure(lambda: held.append(self.forward(received, self.part)))
            outputs = [each for each in tree_leaves(held) if isinstance(each, torch.Tensor)]
            trained = [each for each in outputs if each.requires_grad]
            gradients: list[torch.Tensor] | None = None
            if not (len(outputs) == 1 and outputs[0].dim() == 0):  # the loss has no gradient that another stage sends
                self.sent = storage_bytes(outputs)
                gradients = [torch.empty_like(each) for each in trained]
            del outputs
            held.clear()
            backward = self._measure(lambda: self._run_backward(trained, gradients, memory, is_last))
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return forward, PassRecord(backward.peak, backward.change - self.sent_back, backward.work)

    def step(self, optimizer: OptimizerFactory | None) -> PassRecord:
        trained = [each for each in self.parameters if each.grad is not None]
        if optimizer is None or not trained:
            return PassRecord()
        with self.recorder:
            made = optimizer(trained)
            return self._measure(made.step)

    def record(
        self, first: tuple[PassRecord, PassRecord], second: tuple[PassRecord, PassRecord], optimizer: PassRecord
    ) -> StageRecord:
        return StageRecord(
            forward=first[0],
            first_backward=first[1],
            next_backward=second[1],
            optimizer=optimizer,
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=storage_bytes(self.parameters),
            buffers=storage_bytes(self.buffers),
            gradients=storage_bytes(each.grad for each in self.parameters if each.grad is not None),
            numbers=sum(each.numel() for each in self.parameters),
        )

    def _run_backward(
        self, outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None, memory: StageMemory | None, is_last: bool
    ) -> None:
        if memory is not None:
            memory.begin_backward(is_last)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        outputs.clear()
        if memory is not None:
            memory.end_backward(is_last)

    def _received(self, boundary: Any) -> torch.Tensor:
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        return self.sandbox.fake_of(tensor).requires_grad_(boundary.requires_grad)

    def _measure(self, run: Callable[[], Any]) -> PassRecord:
        memory = self.recorder.memory
        before = memory.live
        memory.begin_peak()
        self.recorder.take_work()
        run()
        return PassRecord(memory.peak - before, memory.live - before, self.recorder.take_work())
