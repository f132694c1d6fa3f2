"""Records of all stages of a program; of equal stages only some run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import Program, SlapoError, Stage, get_logger
from slapo_training import StageRunner

from ..measurement.engine_stage_run import run_engine_stage
from ..measurement.graph_signature import graph_signature
from ..measurement.model_errors import NEEDS_VALUES
from ..measurement.repeated_blocks import Trims
from ..measurement.stage_record import StageRecord
from ..measurement.stage_run import OptimizerFactory, run_stage
from ..recording.segments import PassRecord
from ..recording.storage_tracker import storage_bytes

MOST_BYTES_WITH_VALUES = 2**28
"""Largest parameters of a stage that runs on real tensors."""

_VALUES = (
    "the model reads values that it computed, e.g. to send rows to experts, or writes them into tensors that it made without "
    "them; it ran on real tensors, with random numbers in place of weights on meta, and may take other memory with other values"
)


class _ValueNotes(NamedTuple):
    """Notes on modules whose memory depends on values, or on the device's library.

    Args:
        counted: Sentence for a stage that runs on values.
        left_out: Sentence for a stage that is too large for that.
    """

    counted: str
    left_out: str


_LSTM = _ValueNotes(
    "nn.LSTM keeps a workspace whose size the device's library decides; it is counted as on this machine's CPU",
    "nn.LSTM keeps a workspace whose size the device's library decides; that of a stage of this size is not counted",
)
_SPARSE = _ValueNotes(
    "gradients of sparse embeddings have the rows of this batch; an optimizer's momentum for them grows with each step, and is "
    "counted as after the first",
    "rows that sparse gradients gain with each micro-batch, and optimizer state for them, are not counted",
)

MOST_VALUES = 2**20
"""Elements of a value that depends on the batch alone, such as a mask, up to which it is computed for the model to read."""

_ATTEMPTS: tuple[tuple[int | None, Trims], ...] = (
    (MOST_VALUES, "all"),
    (MOST_VALUES, "largest"),
    (None, "all"),
    (None, "none"),
)
"""Largest computed value, and the runs of which blocks are left out; each is for models that do not run with those before."""


def stage_records(
    program: Program,
    runner: StageRunner,
    part: Mapping[str, Any],
    optimizer: OptimizerFactory | None,
    split: Collection[int] = (),
    microbatches: int = 1,
) -> list[StageRecord]:
    """Run one micro-batch through the stages of a program.

    Of stages with equal graphs and shapes the first and the last run; if their records differ, all do.

    Args:
        program: The program for this micro-batch.
        runner: Runs its stages.
        part: The micro-batch.
        optimizer: Makes the optimizer.
        split: Indices of the stages whose backwards are split in two.
        microbatches: Number of micro-batches of a step.
    """
    engines = runner.memories(optimizer)

    def record(index: int, note: str = "") -> StageRecord:
        """Run a stage; with a note on real tensors."""

        def forward(received: tuple[torch.Tensor, ...], arguments: Mapping[str, Any]) -> Any:
            return runner.run(program, index, received, dict(arguments))

        stage = program.stages[index]
        if engines:
            replicas = [run_engine_stage(stage, part, forward, each, microbatches) for each in engines]
            return max(replicas, key=_peak_of_replica)
        can_run_on_values = storage_bytes(stage.module.parameters()) <= MOST_BYTES_WITH_VALUES
        kinds = _kinds_with_values(stage.module)
        with_values = bool(note) or (can_run_on_values and bool(kinds))
        notes = (*([note] if note else []), *(each.counted if can_run_on_values else each.left_out for each in kinds))
        whole = partial(runner.whole_tensors, program, index)

        def run(most_values: int | None, trims: Trims) -> StageRecord:
            held, how = runner.parameters(program, index), (most_values, trims, with_values)
            found = run_stage(stage, part, forward, optimizer, held, index in split, *how, whole)
            return replace(found, notes=notes)

        try:
            return _first_that_runs(run)
        except NEEDS_VALUES:
            if with_values or not can_run_on_values:
                raise
            return record(index, _VALUES)
        except SlapoError as err:
            if not runner.adapts_to(err):
                raise
        return record(index, note)

    groups: dict[Hashable, list[int]] = defaultdict(list)
    for stage in program.stages:
        groups[_signature(stage), stage.index in split].append(stage.index)
    found: dict[int, StageRecord] = {}
    for equal in groups.values():
        found |= _records_of_equal(equal, record)
    return [found[stage.index] for stage in program.stages]


def needs_values(module: nn.Module) -> bool:
    """Return True if the memory of a stage depends on values, or on the device's library, and it is small enough to run so."""
    return bool(_kinds_with_values(module)) and storage_bytes(module.parameters()) <= MOST_BYTES_WITH_VALUES


def _kinds_with_values(module: nn.Module) -> list[_ValueNotes]:
    modules = [*module.modules()]
    found = [_LSTM] if any(isinstance(each, nn.LSTM) for each in modules) else []
    return [*found, _SPARSE] if any(getattr(each, "sparse", False) is True for each in modules) else found


def _first_that_runs(run: Callable[[int | None, Trims], StageRecord]) -> StageRecord:
    for attempt in _ATTEMPTS[:-1]:
        try:
            return run(*attempt)
        except SlapoError:
            raise
        except Exception as err:  # e.g. the code takes the output of a block by its number
            get_logger().debug("a stage runs again with all its blocks and masks: %s", err)
    return run(*_ATTEMPTS[-1])


def _records_of_equal(equal: list[int], record: Callable[[int], StageRecord]) -> dict[int, StageRecord]:
    ends = {index: record(index) for index in {equal[0], equal[-1]}}
    if ends[equal[0]] != ends[equal[-1]]:
        return ends | {index: record(index) for index in equal[1:-1]}
    return dict.fromkeys(equal, ends[equal[0]])


def _peak_of_replica(record: StageRecord) -> int:
    """Return the most bytes beyond the parameters if micro-batches run one after the other."""
    passes = [each for microbatch in record.microbatches for each in microbatch]
    return sum(record.held.values()) + PassRecord.join([*passes, *([record.step] if record.step is not None else [])]).peak


def _signature(stage: Stage) -> Hashable:
    """Return what decides the record of a stage, without the numbers of its layers."""
    if (found := graph_signature(stage.module)) is None:
        return id(stage.module)
    inputs = tuple((each.shape, each.dtype, each.requires_grad) for each in stage.inputs)
    return (found, inputs, stage.batch_inputs)
