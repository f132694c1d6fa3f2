"""Records of all stages of a program; of equal stages only some run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any

import torch

from slapo_core import Program, SlapoError, Stage
from slapo_training import StageRunner

from ..measurement.engine_stage_run import run_engine_stage
from ..measurement.repeated_blocks import block_signature
from ..measurement.stage_record import StageRecord
from ..measurement.stage_run import OptimizerFactory, run_stage
from ..recording.segments import PassRecord

_BLOCK_NUMBER = re.compile(r"(?<=[._])\d+(?=[._)]|$)")


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

    def record(index: int) -> StageRecord:
        def forward(received: tuple[torch.Tensor, ...], arguments: Mapping[str, Any]) -> Any:
            return runner.run(program, index, received, dict(arguments))

        if engines:
            replicas = [run_engine_stage(program.stages[index], part, forward, each, microbatches) for each in engines]
            return max(replicas, key=_peak_of_replica)
        try:
            held = runner.parameters(program, index)
            whole = partial(runner.whole_tensors, program, index)
            return run_stage(program.stages[index], part, forward, optimizer, held, index in split, whole)
        except SlapoError as err:
            if not runner.adapts_to(err):
                raise
            return record(index)

    groups: dict[Hashable, list[int]] = defaultdict(list)
    for stage in program.stages:
        groups[_signature(stage), stage.index in split].append(stage.index)
    found: dict[int, StageRecord] = {}
    for equal in groups.values():
        found |= _records_of_equal(equal, record)
    return [found[stage.index] for stage in program.stages]


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
    code = getattr(stage.module, "code", None)
    if not isinstance(code, str):
        return id(stage.module)
    inputs = tuple((each.shape, each.dtype, each.requires_grad) for each in stage.inputs)
    return (_BLOCK_NUMBER.sub("#", code), inputs, stage.batch_inputs, block_signature(stage.module))
