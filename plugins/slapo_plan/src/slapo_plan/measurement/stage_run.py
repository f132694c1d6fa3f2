"""One micro-batch through one stage on fake tensors: what its forward and its backward allocate, compute and send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from slapo_core import Boundary, Stage
from slapo_tracing.recording import Sandbox

from .repeated_blocks import BlockRun, block_runs, trimmed
from .run_recorder import RunRecorder
from .segments import PassRecord, SegmentMarks, Segments
from .storage_tracker import storage_bytes

StageForward = Callable[[tuple[torch.Tensor, ...], Mapping[str, Any]], Any]
"""Runs the stage on its received tensors and its arguments of the batch; returns its outputs, or the loss."""
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


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
    stage: Stage, part: Mapping[str, Any], forward: StageForward, optimizer: OptimizerFactory | None = None
) -> StageRecord:
    """Run two micro-batches through a stage on fake tensors, and one step of the optimizer; the model does not change.

    Values that depend on the batch alone are real, so that models decide by them as in training.

    Args:
        stage: The stage; its weights may be on meta.
        part: Arguments of one micro-batch, with labels; real tensors.
        forward: Calls the stage as its engine does.
        optimizer: Makes the optimizer; None for a stage that is not stepped.
    """
    runs = block_runs(stage.module)
    sizes = _Sizes.of(stage.module.parameters()), storage_bytes(stage.module.buffers())
    with trimmed(runs):
        sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
        with sandbox.open(grad=True):
            return StageRun(stage, part, forward, sandbox, runs).record(optimizer, *sizes)


class _Sizes(NamedTuple):
    """Bytes and number of elements of parameters, tied ones once."""

    nbytes: int
    numbers: int

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> _Sizes:
        unique = [*{id(each): each for each in parameters}.values()]
        return cls(storage_bytes(unique), sum(each.numel() for each in unique))


class StageRun:
    """Runs of one stage in an open sandbox, with few blocks of each run of equal ones."""

    def __init__(
        self,
        stage: Stage,
        part: Mapping[str, Any],
        forward: StageForward,
        sandbox: Sandbox,
        runs: list[BlockRun],
        recorder: RunRecorder | None = None,
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox = stage, part, forward, sandbox
        self.recorder = recorder or RunRecorder()
        self.recorder.memory.add([[*stage.module.parameters()], [*stage.module.buffers()], [*part.values()]])
        paths = {id(module): path for path, module in stage.module.named_modules()}
        blocks = {paths[id(block)]: block for run in runs for block in run.holder._modules.values() if block is not None}
        self.marks = SegmentMarks(self.recorder, blocks)
        self.repeated = {paths[id(run.measured)]: run.dropped for run in runs if run.dropped}
        self.blocks = blocks
        self.received = self.sent = self.sent_back = 0

    def record(self, optimizer: OptimizerFactory | None, parameters: _Sizes, buffers: int) -> StageRecord:
        with self.marks:
            first, second = self.run_microbatch(), self.run_microbatch()
        trained = [each for each in self.stage.module.parameters() if each.grad is not None]
        gradients, step = storage_bytes(each.grad for each in trained if each.grad is not None), self._step(optimizer, trained)
        for path, times in self.repeated.items():
            own = [each for each in self.blocks[path].parameters() if each.grad is not None]
            gradients += times * storage_bytes(each.grad for each in own if each.grad is not None)
            step = PassRecord.join([step, *[self._step(optimizer, own)] * times])
        return StageRecord(
            forward=first[0].whole(self.repeated),
            first_backward=self.without_sent(first[1]),
            next_backward=self.without_sent(second[1]),
            optimizer=step,
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=parameters.nbytes,
            buffers=buffers,
            gradients=gradients,
            numbers=parameters.numbers,
        )

    def run_microbatch(self) -> tuple[Segments, Segments]:
        """Run the forward and the backward of a micro-batch."""
        received = tuple(map(self._received, self.stage.inputs))
        self.recorder.memory.add(received)
        self.received = storage_bytes(received)
        held: list[Any] = []
        with self.recorder:
            forward = self.marks.measure(lambda: held.append(self.forward(received, self.part)))
            outputs = [each for each in tree_leaves(held) if isinstance(each, torch.Tensor)]
            trained = [each for each in outputs if each.requires_grad]
            gradients: list[torch.Tensor] | None = None
            if not (len(outputs) == 1 and outputs[0].dim() == 0):  # the loss has no gradient that another stage sends
                self.sent = storage_bytes(outputs)
                gradients = [torch.empty_like(each) for each in trained]
            del outputs
            held.clear()
            backward = self.marks.measure(lambda: self.run_backward(trained, gradients))
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return forward, backward

    def sizes_of_parameters(self) -> tuple[int, int]:
        """Return bytes and number of elements of the parameters in the sandbox."""
        return _Sizes.of(self.stage.module.parameters())

    def size_of_buffers(self) -> int:
        """Return the bytes of the buffers in the sandbox."""
        return storage_bytes(self.stage.module.buffers())

    def without_sent(self, backward: Segments) -> PassRecord:
        """Return the record of a backward without the gradients that it sends."""
        whole = backward.whole(self.repeated)
        return PassRecord(whole.peak, whole.change - self.sent_back, whole.work)

    def _step(self, optimizer: OptimizerFactory | None, parameters: list[Any]) -> PassRecord:
        if optimizer is None or not parameters:
            return PassRecord()
        with self.recorder:
            made = optimizer(parameters)
            return self.marks.measure(made.step).whole()

    def run_backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None) -> None:
        """Run the backward; the gradients are those of the outputs, None for a loss."""
        if outputs:
            torch.autograd.backward(outputs, gradients)
        outputs.clear()

    def _received(self, boundary: Boundary) -> torch.Tensor:
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        return self.sandbox.fake_of(tensor).requires_grad_(boundary.requires_grad)
