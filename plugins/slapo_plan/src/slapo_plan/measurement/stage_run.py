"""One micro-batch through one stage on fake tensors: what its forward and its backward allocate, compute and send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from slapo_core import Stage
from slapo_tracing.recording import Sandbox

from ..records import Work
from .run_recorder import RunRecorder
from .storage_tracker import storage_bytes

StageForward = Callable[[tuple[torch.Tensor, ...], Mapping[str, Any]], Any]
"""Runs the stage on its received tensors and its arguments of the batch; returns its outputs, or the loss."""


@dataclass(frozen=True)
class PassRecord:
    """One forward or backward of one micro-batch.

    Args:
        peak: Most bytes during the pass beyond those at its start.
        change: Bytes at its end beyond those at its start; negative in a backward that frees activations.
        work: Operators and collectives, in order.
    """

    peak: int
    change: int
    work: tuple[Work, ...] = ()


@dataclass(frozen=True)
class StageRecord:
    """One micro-batch through one stage on one rank.

    Args:
        forward: The forward, until its outputs are there.
        first_backward: The backward that allocates the gradients of parameters.
        next_backward: A backward that adds to them.
        received: Bytes of the tensors that the stage receives.
        sent: Bytes of its outputs; 0 in the last stage.
        sent_back: Bytes of the gradients of received tensors.
        parameters: Bytes of parameters.
        buffers: Bytes of buffers.
        gradients: Bytes of the gradients of parameters.
    """

    forward: PassRecord
    first_backward: PassRecord
    next_backward: PassRecord
    received: int
    sent: int
    sent_back: int
    parameters: int
    buffers: int
    gradients: int


def run_stage(stage: Stage, part: Mapping[str, Any], forward: StageForward) -> StageRecord:
    """Run one micro-batch twice through a stage, forward and backward, on fake tensors; the model does not change.

    Values that depend on the batch alone are real, so that models decide by them as in training.

    Args:
        stage: The stage; its weights may be on meta.
        part: Arguments of one micro-batch, with labels; real tensors.
        forward: Calls the stage as its engine does.
    """
    sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        run = _StageRun(stage, part, forward, sandbox, RunRecorder())
        first = run.microbatch()
        return run.record(first, run.microbatch())


class _StageRun:
    def __init__(
        self, stage: Stage, part: Mapping[str, Any], forward: StageForward, sandbox: Sandbox, recorder: RunRecorder
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox, self.recorder = stage, part, forward, sandbox, recorder
        self.parameters = [*stage.module.parameters()]
        self.buffers = [*stage.module.buffers()]
        recorder.memory.add([self.parameters, self.buffers, list(part.values())])
        self.received = self.sent = self.sent_back = 0

    def microbatch(self) -> tuple[PassRecord, PassRecord]:
        received = tuple(self._received())
        self.recorder.memory.add(received)
        self.received = storage_bytes(received)
        holder: list[Any] = []
        with self.recorder:
            forward = self._pass(lambda: holder.append(self.forward(received, self.part)))
            outputs = [each for each in tree_leaves(holder) if isinstance(each, torch.Tensor)]
            gradients: list[torch.Tensor] | None = None
            trained = [each for each in outputs if each.requires_grad]
            if not self._is_last(outputs):
                self.sent = storage_bytes(outputs)
                gradients = [torch.empty_like(each) for each in trained]
            del outputs
            holder.clear()
            backward = self._pass(lambda: self._backward(trained, gradients))
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return forward, backward

    def _is_last(self, outputs: list[torch.Tensor]) -> bool:
        return len(outputs) == 1 and outputs[0].dim() == 0

    def _backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None) -> None:
        if outputs:
            torch.autograd.backward(outputs, gradients)
        outputs.clear()

    def _received(self) -> Any:
        for boundary in self.stage.inputs:
            tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
            yield self.sandbox.fake_of(tensor).requires_grad_(boundary.requires_grad)

    def _pass(self, run: Callable[[], Any]) -> PassRecord:
        memory = self.recorder.memory
        before = memory.live
        memory.begin_peak()
        self.recorder.take_work()
        run()
        return PassRecord(memory.peak - before, memory.live - before, self.recorder.take_work())

    def record(self, first: tuple[PassRecord, PassRecord], second: tuple[PassRecord, PassRecord]) -> StageRecord:
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        return StageRecord(
            forward=first[0],
            first_backward=first[1],
            next_backward=second[1],
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=storage_bytes(self.parameters),
            buffers=storage_bytes(self.buffers),
            gradients=storage_bytes(gradients),
        )
