"""One micro-batch through one stage on fake tensors: what its forward and its backward allocate, compute and send."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core import Boundary, Stage
from slapo_tracing.recording import Sandbox
from slapo_training import StageParameters

from ..recording.run_recorder import RunRecorder
from ..recording.segments import PassRecord, SegmentMarks, Segments
from ..recording.storage_tracker import resizes_noted, storage_bytes
from .gradient_arrivals import GradientArrivals
from .repeated_blocks import block_runs, trimmed_runs
from .segmented_stage import SegmentedStage
from .split_backward import SplitBackward
from .stage_record import StageRecord

StageForward = Callable[[tuple[torch.Tensor, ...], Mapping[str, Any]], Any]
"""Runs the stage on its received tensors and its arguments of the batch; returns its outputs, or the loss."""
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


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
        splits: True to run two more micro-batches whose backwards are split in two.
    """
    held = parameters or StageParameters()
    runs = block_runs(stage.module, held.units_ahead) if held.units_ahead is not None else []
    nbytes, numbers = held.sizes(stage.module)
    buffers = storage_bytes(stage.module.buffers())
    with trimmed_runs(runs):
        paths = {id(module): path for path, module in stage.module.named_modules()}
        repeated = {paths[id(run.measured)]: run.num_dropped for run in runs if run.num_dropped}
        blocks = {paths[id(block)]: block for run in runs for block in run.holder._modules.values() if block is not None}
        found = run_segmented(stage, part, forward, optimizer, blocks, held, splits, repeated)
    return found.record(repeated, nbytes, buffers, numbers)


def run_segmented(
    stage: Stage,
    part: Mapping[str, Any],
    forward: StageForward,
    optimizer: OptimizerFactory | None,
    blocks: Mapping[str, nn.Module],
    parameters: StageParameters,
    splits: bool,
    repeated: Mapping[str, int],
) -> SegmentedStage:
    """Run a stage as ``run_stage`` does, and keep its passes cut at some blocks.

    Args:
        stage: The stage.
        part: Arguments of one micro-batch.
        forward: Calls the stage as its engine does.
        optimizer: Makes the optimizer.
        blocks: Modules of the stage by path.
        parameters: Parameters of the stage as its engine holds them.
        splits: True to run two more micro-batches whose backwards are split in two.
        repeated: Number of further blocks that one of them stands for, by path; these have their own optimizer's step.
    """
    sandbox = Sandbox(stage.module, part, fake=True, keeps_values=True)
    with sandbox.open(grad=True), warnings.catch_warnings():
        # torch reads the gradient of each real tensor that it makes a fake one of, e.g. in the cache of autocast
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        run = _StageRun(stage, part, forward, sandbox, blocks, repeated, parameters)
        try:
            return run.record(optimizer, splits)
        finally:
            parameters.close()


def step_record(recorder: RunRecorder, optimizer: OptimizerFactory, parameters: list[nn.Parameter]) -> PassRecord:
    """Return the record of an optimizer's first step on parameters with gradients."""
    recorder.answers = True
    try:
        with recorder:
            return SegmentMarks(recorder, {}).measure(optimizer(parameters).step).whole()
    finally:
        recorder.answers = False


class _StageRun:
    """Runs of one stage in an open sandbox, with few blocks of each run of equal ones."""

    def __init__(
        self,
        stage: Stage,
        part: Mapping[str, Any],
        forward: StageForward,
        sandbox: Sandbox,
        blocks: Mapping[str, nn.Module],
        repeated: Mapping[str, int],
        parameters: StageParameters,
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox = stage, part, forward, sandbox
        self.recorder = RunRecorder()
        of_block = {path: {id(each) for each in blocks[path].parameters()} for path in repeated}
        self.arrivals = GradientArrivals([*stage.module.parameters()], of_block, repeated)
        self.parameters = parameters
        parameters.bind(stage.module, sandbox.originals)
        whole = zip(parameters.whole, parameters.held, strict=True)
        held = {id(each): own for each, own in whole}
        self.of_block = {path: [held[each] for each in held if each in ids] for path, ids in of_block.items()}
        self.recorder.memory.add([parameters.held, [*stage.module.buffers()], [*part.values()]])
        self.marks = SegmentMarks(self.recorder, dict(blocks))
        self.received = self.sent = self.sent_back = 0

    def record(self, optimizer: OptimizerFactory | None, splits: bool) -> SegmentedStage:
        with resizes_noted(self.recorder.memory), self.recorder, self.marks:
            begin = self.marks.measure(self.parameters.begin_step).whole()
            with self.arrivals.note_arrivals():
                forward, first = self._run_microbatch(self._run_backward)
            following = self._run_microbatch(self._run_backward)[1]
            parts = self._run_split() if splits else None
            end = self.marks.measure(self.parameters.end_step).whole()
        trained = [each for each in self.parameters.held if each.grad is not None]
        of_block = {path: [each for each in own if each.grad is not None] for path, own in self.of_block.items()}
        return SegmentedStage(
            begin=begin,
            forward=forward,
            first_backward=first[0],
            next_backward=following[0],
            inputs_backward=None if parts is None else parts[0],
            first_weights=Segments() if parts is None else parts[1],
            next_weights=Segments() if parts is None else parts[2],
            end=end,
            optimizer=self._step(optimizer, trained),
            block_optimizer={path: self._step(optimizer, own) for path, own in of_block.items()},
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            gradients=_gradient_bytes(trained),
            block_gradients={path: _gradient_bytes(own) for path, own in of_block.items()},
            block_outputs=dict(self.marks.outputs),
            arrivals=self.arrivals.sizes(),
            unused=self.arrivals.num_unused,
        )

    def _run_split(self) -> tuple[Segments, Segments, Segments] | None:
        """Run two micro-batches with split backwards: one without gradients of parameters, and one that adds to them."""
        for each in self.parameters.whole:
            each.grad = None
        first = self._run_microbatch(self._run_backward_in_parts)[1]
        following = self._run_microbatch(self._run_backward_in_parts)[1]
        return (following[0], first[1], following[1]) if len(first) > 1 else None

    def _run_microbatch(
        self, run_backward: Callable[[list[torch.Tensor], Sequence[torch.Tensor]], list[Segments]]
    ) -> tuple[Segments, list[Segments]]:
        received = tuple(map(self._receive_buffer, self.stage.inputs))
        self.recorder.memory.add(received)
        self.received = storage_bytes(received)
        made: list[Any] = []
        with ExitStack() as context:
            context.enter_context(self.parameters.microbatch())
            forward = self.marks.measure(lambda: made.append(self.forward(received, self.part)))
            outputs = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
            made.clear()
            passes = run_backward(outputs, received)
            rest = self.marks.measure(context.close)  # e.g. the last reductions of FSDP
        return forward, [*passes[:-1], Segments([*passes[-1].parts, *rest.parts])]

    def _output_gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if len(outputs) == 1 and outputs[0].dim() == 0:  # the loss has no gradient that another stage sends
            return None
        self.sent = storage_bytes(outputs)
        return [torch.empty_like(each) for each in outputs if each.requires_grad]

    def _run_backward(self, outputs: list[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Segments]:
        gradients = self._output_gradients(outputs)

        def run() -> None:
            trained = [each for each in outputs if each.requires_grad]
            outputs.clear()
            if trained:
                torch.autograd.backward(trained, gradients)

        return [self._without_sent(self.marks.measure(run), received)]

    def _run_backward_in_parts(self, outputs: list[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Segments]:
        trained = [each for each in outputs if each.requires_grad]
        if not SplitBackward.is_possible(trained, received):
            del trained
            return self._run_backward(outputs, received)
        gradients = self._output_gradients(outputs)  # kept until the end: the engine has them in receive buffers
        split = SplitBackward(trained, gradients, received, self.parameters.whole)
        outputs.clear()
        del trained
        first = self._without_sent(self.marks.measure(split.run_inputs), received)
        return [first, self.marks.measure(split.run_weights)]

    def _without_sent(self, backward: Segments, received: Sequence[torch.Tensor]) -> Segments:
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return Segments([*backward.parts, ("", PassRecord(0, -self.sent_back))])

    def _step(self, optimizer: OptimizerFactory | None, parameters: list[nn.Parameter]) -> PassRecord:
        if optimizer is None or not parameters:
            return PassRecord()
        return step_record(self.recorder, optimizer, parameters)

    def _receive_buffer(self, boundary: Boundary) -> torch.Tensor:
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        return self.sandbox.fake_of(tensor).requires_grad_(boundary.requires_grad)


def _gradient_bytes(parameters: Sequence[nn.Parameter]) -> int:
    return storage_bytes(each.grad for each in parameters if each.grad is not None)
