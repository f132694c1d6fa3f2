"""One micro-batch through one stage on fake tensors: what its forward and its backward allocate, compute and send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from slapo_core import Stage
from slapo_tracing.recording import Sandbox
from slapo_training import StageParameters

from ..records import Work
from .run_recorder import RunRecorder
from .split_backward import SplitBackward
from .storage_tracker import resizes_noted, storage_bytes

StageForward = Callable[[tuple[torch.Tensor, ...], Mapping[str, Any]], Any]
"""Runs the stage on its received tensors and its arguments of the batch; returns its outputs, or the loss."""
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


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


_Backward = Callable[[list[torch.Tensor], Sequence[torch.Tensor]], list[PassRecord]]
"""Runs the backward of outputs, given the received tensors; returns the records of its parts."""


@dataclass(frozen=True)
class StageRecord:
    """One micro-batch through one stage on one rank.

    Args:
        begin: The start of a step, which gathers what stays gathered.
        forward: The forward, until its outputs are there.
        first_backward: The backward that allocates the gradients of parameters, without the gradients that it sends.
        next_backward: A backward that adds to them, alike.
        inputs_backward: The first part of a split backward, for gradients of the stage's inputs, alike; None if none is split.
        first_weights: The second part, for gradients of parameters, which allocates these.
        next_weights: A second part that adds to them.
        end: The end of a step, which reduces gradients and frees what was gathered.
        optimizer: The first step of the optimizer, which allocates its state.
        received: Bytes of the tensors that the stage receives.
        sent: Bytes of its outputs; 0 in the last stage.
        sent_back: Bytes of the gradients of received tensors.
        parameters: Bytes of parameters between steps.
        buffers: Bytes of buffers.
        gradients: Bytes of the gradients of parameters between steps.
        numbers: Number of elements of parameters.
        arrival: Indices of parameters in the order in which their gradients arrive in a backward.
    """

    begin: PassRecord
    forward: PassRecord
    first_backward: PassRecord
    next_backward: PassRecord
    inputs_backward: PassRecord | None
    first_weights: PassRecord
    next_weights: PassRecord
    end: PassRecord
    optimizer: PassRecord
    received: int
    sent: int
    sent_back: int
    parameters: int
    buffers: int
    gradients: int
    numbers: int
    arrival: tuple[int, ...] = ()


def run_stage(
    stage: Stage,
    part: Mapping[str, Any],
    forward: StageForward,
    optimizer: OptimizerFactory | None = None,
    parameters: StageParameters | None = None,
    splits: bool = False,
) -> StageRecord:
    """Run two micro-batches through a stage on fake tensors, and one step of the optimizer; the model does not change.

    Values that depend on the batch alone are real, so that models decide by them as in training.

    Args:
        stage: The stage; its weights may be on meta.
        part: Arguments of one micro-batch, with labels; real tensors.
        forward: Calls the stage as its engine does.
        optimizer: Makes the optimizer; None for a stage that is not stepped.
        parameters: Parameters of the stage as its engine holds them; None for whole ones.
        splits: True to run two more micro-batches whose backward is split in two.
    """
    sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
    parameters = parameters or StageParameters()
    with sandbox.open(grad=True):
        parameters.bind(stage.module)
        try:
            return _StageRun(stage, part, forward, sandbox, parameters).run(optimizer, splits)
        finally:
            parameters.close()


class _StageRun:
    def __init__(
        self, stage: Stage, part: Mapping[str, Any], forward: StageForward, sandbox: Sandbox, parameters: StageParameters
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox = stage, part, forward, sandbox
        self.recorder = RunRecorder()
        self.parameters = parameters
        self.whole = parameters.whole
        self.buffers = [*stage.module.buffers()]
        self.recorder.memory.add([parameters.held, self.buffers, [*part.values()]])
        self.received = self.sent = self.sent_back = 0
        self.arrival: list[int] = []

    def run(self, optimizer: OptimizerFactory | None, splits: bool) -> StageRecord:
        with resizes_noted(self.recorder.memory), self.recorder:
            begin = self._measure(self.parameters.begin_step)
            with self._arrivals_noted():
                forward, first = self._run_microbatch(self._run_backward)
            _, following = self._run_microbatch(self._run_backward)
            parts = self._run_split() if splits else (None, PassRecord(), PassRecord())
            end = self._measure(self.parameters.end_step)
            step = self._step(optimizer)
        return StageRecord(
            begin=begin,
            forward=forward,
            first_backward=first[0],
            next_backward=following[0],
            inputs_backward=parts[0],
            first_weights=parts[1],
            next_weights=parts[2],
            end=end,
            optimizer=step,
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            parameters=storage_bytes(self.parameters.held),
            buffers=storage_bytes(self.buffers),
            gradients=storage_bytes(each.grad for each in self.parameters.held if each.grad is not None),
            numbers=sum(each.numel() for each in self.parameters.held),
            arrival=tuple(self.arrival),
        )

    def _run_split(self) -> tuple[PassRecord | None, PassRecord, PassRecord]:
        """Run two micro-batches with split backwards: from no gradients of parameters, and from the first's."""
        for each in self.whole:
            each.grad = None
        first = self._run_microbatch(self._run_backward_in_parts)[1]
        following = self._run_microbatch(self._run_backward_in_parts)[1]
        return following[0], first[1], following[1]

    def _run_microbatch(self, run_backward: _Backward) -> tuple[PassRecord, list[PassRecord]]:
        received = tuple(map(self._received, self.stage.inputs))
        self.recorder.memory.add(received)
        self.received = storage_bytes(received)
        with self.parameters.microbatch():
            made: list[Any] = []
            forward = self._measure(lambda: made.append(self.forward(received, self.part)))
            outputs = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
            made.clear()
            return forward, run_backward(outputs, received)

    def _output_gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if len(outputs) == 1 and outputs[0].dim() == 0:  # the loss has no gradient that another stage sends
            return None
        self.sent = storage_bytes(outputs)
        return [torch.empty_like(each) for each in outputs if each.requires_grad]

    def _run_backward(self, outputs: list[torch.Tensor], received: Sequence[torch.Tensor]) -> list[PassRecord]:
        gradients = self._output_gradients(outputs)

        def run() -> None:
            trained = [each for each in outputs if each.requires_grad]
            outputs.clear()
            if trained:
                torch.autograd.backward(trained, gradients)

        backward = self._measure(run)
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return [replace(backward, change=backward.change - self.sent_back)]

    def _run_backward_in_parts(self, outputs: list[torch.Tensor], received: Sequence[torch.Tensor]) -> list[PassRecord]:
        gradients = self._output_gradients(outputs)
        split = SplitBackward([each for each in outputs if each.requires_grad], gradients, received, self.whole)
        outputs.clear()
        first = self._measure(split.run_inputs)
        sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return [replace(first, change=first.change - sent_back), self._measure(split.run_weights)]

    def _step(self, optimizer: OptimizerFactory | None) -> PassRecord:
        trained = [each for each in self.parameters.held if each.grad is not None]
        if optimizer is None or not trained:
            return PassRecord()
        made = optimizer(trained)
        return self._measure(made.step)

    def _received(self, boundary: Any) -> torch.Tensor:
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        return self.sandbox.fake_of(tensor).requires_grad_(boundary.requires_grad)

    @contextmanager
    def _arrivals_noted(self) -> Iterator[None]:
        handles = []
        for index, parameter in enumerate(self.whole):
            if parameter.requires_grad:
                note: Any = partial(_note_arrival, self.arrival, index)
                handles.append(get_gradient_edge(parameter).node.register_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _measure(self, run: Callable[[], Any]) -> PassRecord:
        memory = self.recorder.memory
        before = memory.live
        memory.begin_peak()
        self.recorder.take_work()
        run()
        return PassRecord(memory.peak - before, memory.live - before, self.recorder.take_work())


def _note_arrival(arrival: list[int], index: int, *_: Any) -> None:
    if index not in arrival:
        arrival.append(index)
