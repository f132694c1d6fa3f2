"""One micro-batch through one stage on fake tensors: what its forward and its backward allocate, compute and send."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core import Boundary, ScheduleError, Stage, failure_reason
from slapo_tracing.recording import Sandbox
from slapo_training import StageParameters
from slapo_training.optimizers import FakeWholeTensors

from ..recording.run_recorder import RunRecorder
from ..recording.segments import PassRecord, RepeatedBlocks, SegmentMarks, Segments
from ..recording.storage_tracker import resizes_noted, storage_bytes
from ..records import CollectiveRecord
from ._torch_private import FakeTensorMode
from .gradient_arrivals import GradientArrivals, gradient_bytes, sparse_bytes
from .repeated_blocks import LONGEST_PATTERN, BlocksNotRunError, Trims, block_runs, largest_run, trimmed_runs
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
    most_values: int | None = None,
    trims: Trims = "all",
    with_values: bool = False,
    whole_tensors: Callable[[OptimizerFactory], FakeWholeTensors | None] = lambda optimizer: None,
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
        most_values: Number of elements from which a value that depends on the batch alone is not real; None for any number.
        trims: Runs of blocks of which some are left out: all; the one with the most parameters, for a model that reads the
            outputs of others by their numbers, as Llava does of its vision tower; or none.
        with_values: True to run on real copies of the weights, random ones in place of those on meta.
        whole_tensors: Makes the step of an optimizer that steps whole tensors; None for any other optimizer.
    """
    held = parameters or StageParameters()
    is_trimmed = trims != "none" and held.units_ahead is not None
    runs = block_runs(stage.module, held.units_ahead or 0, LONGEST_PATTERN) if is_trimmed else []
    runs = largest_run(runs) if trims == "largest" else runs
    nbytes, numbers = held.sizes(stage.module)
    buffers = storage_bytes(stage.module.buffers())
    with trimmed_runs(runs):
        paths = {id(module): path for path, module in stage.module.named_modules()}
        blocks = {paths[id(block)]: block for run in runs for block in run.kept_blocks}
        repeated = [run.repeated_blocks(paths) for run in runs if run.num_dropped]
        found = run_segmented(stage, part, forward, optimizer, blocks, repeated, held, splits, most_values, with_values)
    BlocksNotRunError.check((path for each in repeated for path in each.paths), {name for name, _ in found.forward.parts})
    record = found.record(repeated, nbytes, buffers, numbers)
    whole = whole_step_record(optimizer, whole_tensors) if optimizer is not None else None
    return record if whole is None else replace(record, optimizer=whole)


def run_segmented(
    stage: Stage,
    part: Mapping[str, Any],
    forward: StageForward,
    optimizer: OptimizerFactory | None,
    blocks: Mapping[str, nn.Module],
    repeated: Sequence[RepeatedBlocks],
    parameters: StageParameters,
    splits: bool = False,
    most_values: int | None = None,
    with_values: bool = False,
) -> SegmentedStage:
    """Run a stage as ``run_stage`` does, and keep its passes cut at some blocks; arguments as there.

    Args:
        blocks: Modules of the stage at which passes are cut, by path.
        repeated: Blocks that stand for others; their part in the optimizer's step is told apart.
    """
    fake = not with_values
    sandbox = Sandbox(stage.module, part, fake=fake, keeps_values=fake, most_values=most_values, copies=with_values)
    with sandbox.open(grad=True), warnings.catch_warnings():
        # torch reads the gradient of each real tensor that it makes a fake one of, e.g. in the cache of autocast
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        sandbox.keep_schedule_hooks()
        run = _StageRun(stage, part, forward, sandbox, blocks, repeated, parameters)
        try:
            return run.record(optimizer, splits)
        finally:
            parameters.close()


def whole_step_record(
    optimizer: OptimizerFactory, whole_tensors: Callable[[OptimizerFactory], FakeWholeTensors | None]
) -> PassRecord | None:
    """Return the record of a step of an optimizer that steps whole tensors; None for any other optimizer.

    It allocates the state, as a first step, and has the peak of a later one, which gathers tensors while the state exists.
    """
    recorder = RunRecorder()
    recorder.answers = True
    whole = whole_tensors(optimizer)
    if whole is None:
        return None
    with FakeTensorMode():
        recorder.memory.add(whole.prepare())
        with recorder:
            marks = SegmentMarks(recorder, {})
            first, later = (marks.measure(whole.step).whole() for _ in range(2))
    sent = [CollectiveRecord(*each) for each in whole.collectives()]
    return PassRecord(first.change + later.peak, first.change, (*later.work, *sent))


class _StageRun:
    """Runs of one stage in an open sandbox, with few blocks of each run of equal ones."""

    def __init__(
        self,
        stage: Stage,
        part: Mapping[str, Any],
        forward: StageForward,
        sandbox: Sandbox,
        blocks: Mapping[str, nn.Module],
        repeated: Sequence[RepeatedBlocks],
        parameters: StageParameters,
    ) -> None:
        self.stage, self.part, self.forward, self.sandbox = stage, part, forward, sandbox
        self.recorder = RunRecorder()
        self.repeated = repeated
        ids = [{id(own) for path in each.paths for own in blocks[path].parameters()} for each in self.repeated]
        self.arrivals = GradientArrivals([*stage.module.parameters()], ids, [each.times for each in self.repeated])
        self.parameters = parameters
        parameters.bind(stage.module, sandbox.originals)
        whole = zip(parameters.whole, parameters.held, strict=True)
        held = {id(each): own for each, own in whole}
        self.held_of = [[held[each] for each in held if each in some] for some in ids]
        self.recorder.memory.add([parameters.held, [*stage.module.buffers()], [*part.values()]])
        self.marks = SegmentMarks(self.recorder, dict(blocks))
        self.received = self.sent = self.sent_back = self.awaited = 0

    def record(self, optimizer: OptimizerFactory | None, splits: bool) -> SegmentedStage:
        with resizes_noted(self.recorder.memory), self.sandbox.observed_by(self.recorder), self.marks:
            begin = self.marks.measure(self.parameters.begin_step).whole()
            with self.arrivals.note_arrivals():
                first_forward, first = self._run_microbatch(self._run_backward)
            sparse = sparse_bytes(self.parameters.held)
            forward, following = self._run_microbatch(self._run_backward)
            added = sparse_bytes(self.parameters.held) - sparse
            parts = self._run_split() if splits else None
            end = self.marks.measure(self.parameters.end_step).whole()
        trained = [each for each in self.parameters.held if each.grad is not None]
        step = self._step(optimizer, trained)
        of_repeated = [[each for each in held if each.grad is not None] for held in self.held_of]
        return SegmentedStage(
            begin=begin,
            first_forward=first_forward,
            forward=forward,
            first_backward=first[0],
            next_backward=following[0],
            inputs_backward=None if parts is None else parts[0],
            first_weights=Segments() if parts is None else parts[1],
            next_weights=Segments() if parts is None else parts[2],
            end=end,
            optimizer=step,
            repeated_optimizer=self._steps_of_blocks(optimizer, trained, of_repeated, step),
            received=self.received,
            sent=self.sent,
            sent_back=self.sent_back,
            awaited=self.awaited,
            gradients=gradient_bytes(trained) - added,
            added=added,
            repeated_gradients=[gradient_bytes(own) for own in of_repeated],
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
        return forward, [*passes[:-1], passes[-1].followed_by(rest)]

    def _output_gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if len(outputs) == 1 and outputs[0].dim() == 0:  # the loss has no gradient that another stage sends
            return None
        self.sent = storage_bytes(outputs)
        self.awaited = storage_bytes(each for each in outputs if each.requires_grad)
        return [torch.empty_like(each) for each in outputs if each.requires_grad]

    def _run_backward(self, outputs: list[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Segments]:
        gradients = self._output_gradients(outputs)

        def run() -> None:
            trained = [each for each in outputs if each.requires_grad]
            outputs.clear()
            if trained:
                torch.autograd.backward(trained, gradients)

        return [self._without_sent(self.marks.measure(run, is_backward=True), received)]

    def _run_backward_in_parts(self, outputs: list[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Segments]:
        trained = [each for each in outputs if each.requires_grad]
        if not SplitBackward.is_possible(trained, received):
            del trained
            return self._run_backward(outputs, received)
        gradients = self._output_gradients(outputs)  # kept until the end: the engine has them in receive buffers
        split = SplitBackward(trained, gradients, received, self.parameters.whole)
        outputs.clear()
        del trained
        first = self._without_sent(self.marks.measure(split.run_inputs, is_backward=True), received)
        return [first, self.marks.measure(split.run_weights, is_backward=True)]

    def _without_sent(self, backward: Segments, received: Sequence[torch.Tensor]) -> Segments:
        self.sent_back = sum(each.grad.nbytes for each in received if each.grad is not None)
        return backward.followed_by(Segments([("", PassRecord(0, -self.sent_back))], [Counter()]))

    def _step(self, optimizer: OptimizerFactory | None, parameters: list[nn.Parameter]) -> PassRecord:
        """Return the record of an optimizer's step on parameters with gradients.

        ``change`` is the state that the first step leaves. ``peak`` is beyond it what a later step allocates.

        Raises:
            ScheduleError: the optimizer cannot be made, or its step fails.
        """
        if optimizer is None or not parameters:
            return PassRecord()
        made: list[torch.optim.Optimizer] = []  # its state lives until the record is complete

        def run() -> None:
            made.append(optimizer(parameters))
            made[0].step()

        self.recorder.answers = True
        try:
            with self.sandbox.observed_by(self.recorder):
                marks = SegmentMarks(self.recorder, {})
                first, later = marks.measure(run).whole(), marks.measure(lambda: made[0].step()).whole()
                return PassRecord(first.change + later.peak, first.change, later.work)
        except Exception as err:  # optimizers may raise anything
            what = f"the optimizer fails on these parameters: {failure_reason(err)}; give an optimizer that trains them"
            raise ScheduleError(what, primitive="estimate") from err
        finally:
            self.recorder.answers = False

    def _steps_of_blocks(
        self,
        optimizer: OptimizerFactory | None,
        parameters: list[nn.Parameter],
        blocks: list[list[nn.Parameter]],
        step: PassRecord,
    ) -> list[PassRecord]:
        """Return the part of each block; blocks with equal parameters have equal ones."""
        kinds = [tuple((each.shape, each.dtype) for each in own) for own in blocks]
        known = {
            kind: self._step_of_block(optimizer, parameters, own, step)
            for kind, own in dict(zip(kinds, blocks, strict=True)).items()
        }
        return [known[kind] for kind in kinds]

    def _step_of_block(
        self, optimizer: OptimizerFactory | None, parameters: list[nn.Parameter], own: list[nn.Parameter], step: PassRecord
    ) -> PassRecord:
        """Return what parameters like those of a block add to the record of a step of others."""
        copies = [nn.Parameter(torch.empty_like(each)) for each in own]
        for each, copied in zip(own, copies, strict=True):
            copied.grad = torch.empty_like(each) if each.grad is None else torch.empty_like(each.grad)
        self.recorder.memory.add([copies, [each.grad for each in copies]])
        both, alone = self._step(optimizer, [*parameters, *copies]), self._step(optimizer, own)
        return PassRecord(both.peak - step.peak, both.change - step.change, alone.work)

    def _receive_buffer(self, boundary: Boundary) -> torch.Tensor:
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        return self.sandbox.substitute_of(tensor).requires_grad_(boundary.requires_grad)
