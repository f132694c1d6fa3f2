"""Seconds of one step: the records of all stages replayed in the order of the engine's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slapo_core import Program
from slapo_training import PipelineAction, StepModel

from ..hardware import Hardware, collective_seconds, work_seconds
from ..measurement.stage_record import StageRecord
from ..recording.segments import PassRecord
from ..records import CollectiveRecord
from ..simulation import SimulatedStep, StepCosts, simulate_step


def step_time(
    program: Program,
    records: Sequence[StageRecord],
    order: Mapping[int, Sequence[PipelineAction]],
    others: Mapping[int, Sequence[CollectiveRecord]],
    model: type[StepModel],
    options: Mapping[str, Any],
    hardware: Hardware,
) -> SimulatedStep:
    """Replay one step on a cluster.

    Args:
        program: The program, with a rank for each stage.
        records: Record of each stage.
        order: Actions of each rank along ``pp``.
        others: Collectives of each of these ranks that are not in its stages.
        model: How the engine runs a step.
        options: Options of ``build``.
        hardware: The cluster.
    """
    size = program.mesh.size() if program.mesh is not None else 1
    busy = hardware.for_job(size)
    ranks, stages = len(order), len(records)
    microbatches = sum(action.kind == "F" for action in order[0]) // max(1, sum(program.rank_of(i) == 0 for i in range(stages)))
    reductions, fixed = {}, 0.0
    for rank in order:
        own = [index for index in range(stages) if program.rank_of(index) == rank]
        waits = [each for each in others[rank] if each.kind != "send"]
        reduction = sum(collective_seconds(each, busy) for each in waits if each.overlapped)
        single = sum(collective_seconds(each, busy) for each in waits if not each.overlapped)
        gradients = sum(records[index].gradients for index in own)  # 0 for an engine with tensors of its own
        for index in own:
            share = records[index].gradients / gradients if gradients else 1 / len(own)
            reductions[index] = share * reduction + _end_of_step(records[index], busy)
        around = sum(pass_seconds(part, busy) for index in own for part in (records[index].begin, records[index].end))
        fixed = max(fixed, single + around)
    passes = {key: part for index, each in enumerate(records) for key, part in _passes(index, each, microbatches)}
    seconds = {key: _pass_seconds(part, busy) for key, part in passes.items()}
    steps = {
        rank: [
            _pass_seconds(each.step or each.optimizer, busy)
            for index, each in enumerate(records)
            if program.rank_of(index) == rank
        ]
        for rank in order
    }
    costs = StepCosts(
        actions={key: sum(parts) for key, parts in seconds.items()},
        messages=_messages(program, records, busy),
        message_mode=model.message_mode(options, stages, ranks, microbatches),
        reductions=reductions,
        overlapped_reductions=not any(each.microbatches for each in records)
        and model.overlaps_reduction(options, stages, ranks)
        and busy.overlaps,
        buckets={
            index: max(1, len([each for each in others[program.rank_of(index)] if each.overlapped])) for index in reductions
        },
        optimizer={rank: sum(map(sum, parts)) for rank, parts in steps.items()},
        collectives={
            rank: sum(seconds[stage, kind].waiting for kind, stage, _ in row) + sum(each.waiting for each in steps[rank])
            for rank, row in order.items()
        },
        fixed=fixed,
    )
    return simulate_step(order, costs)


def _passes(index: int, record: StageRecord, microbatches: int) -> list[tuple[tuple[int, str], PassRecord]]:
    """Return the passes of a micro-batch before the last one, if there are several."""
    number = min(1, max(0, microbatches - 2))
    kinds = ("F", "B", "I", "W") if record.inputs_backward is not None else ("F", "B", "I")
    found = [((index, kind), record.pass_of(kind, number, microbatches)) for kind in kinds]
    return found if record.inputs_backward is not None else [*found, ((index, "W"), PassRecord())]


def _end_of_step(record: StageRecord, hardware: Hardware) -> float:
    """Return the seconds by which the last backward of a step takes longer, e.g. to reduce all gradients."""
    if len(record.microbatches) < 2:
        return 0.0
    before, last = (pass_seconds(record.microbatches[place][1], hardware) for place in (-2, -1))
    return max(0.0, last - before)


def pass_seconds(part: PassRecord, hardware: Hardware) -> float:
    """Return the seconds of a pass, with those of its collectives that its operators do not hide."""
    return sum(_pass_seconds(part, hardware))


class _PassSeconds(NamedTuple):
    """Seconds of a pass: those of its operators, and those in which it waits for collectives."""

    computing: float
    waiting: float


def _pass_seconds(part: PassRecord, hardware: Hardware) -> _PassSeconds:
    found = work_seconds(part.work, hardware)
    hidden = found.compute if hardware.overlaps else 0.0
    return _PassSeconds(found.compute, found.communication + max(0.0, found.overlapped - hidden))


def _messages(program: Program, records: Sequence[StageRecord], hardware: Hardware) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    apart = program.axis_size("dp") * program.axis_size("tp")
    for index in range(len(records) - 1):
        ends = program.rank_of(index) * apart, program.rank_of(index + 1) * apart
        if ends[0] != ends[1]:
            found[index, index + 1] = collective_seconds(CollectiveRecord("send", records[index].sent, ends), hardware)
            found[index + 1, index] = collective_seconds(CollectiveRecord("send", records[index + 1].sent_back, ends), hardware)
    return found
