"""Pipeline schedules: their requirements on stages and micro-batches, and their placement of stages on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slapo_core import BuildError, Program, UnknownNameError, get_logger
from slapo_training import PipelineAction, one_forward_one_backward


@dataclass(frozen=True)
class ScheduleKind:
    """One pipeline schedule.

    Args:
        runtime: Class name in ``torch.distributed.pipelining``; empty for a CSV file.
        stages_per_rank: Number of stages of a rank; None for any number.
        folded: True if stages go down the ranks and back up, so that the first rank has the first and the last stage.
    """

    runtime: str
    stages_per_rank: int | None = None
    folded: bool = False


KINDS = {
    "1f1b": ScheduleKind("Schedule1F1B", 1),
    "gpipe": ScheduleKind("ScheduleGPipe", 1),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B"),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS"),
    "zero_bubble": ScheduleKind("ScheduleInterleavedZeroBubble"),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", 2, folded=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", 2, folded=True),
}


def is_file(schedule: str) -> bool:
    """Return True if a schedule is the path of a file, in the CSV format of ``torch.distributed.pipelining``."""
    return schedule.endswith(".csv")


def kind_of(schedule: str) -> ScheduleKind:
    """Return the properties of a ``pipeline_schedule``.

    Raises:
        BuildError: no such schedule, or no such file.
    """
    if is_file(schedule):
        if not Path(schedule).is_file():
            raise BuildError(f"pipeline_schedule: there is no file {schedule!r}")
        return ScheduleKind("")
    if schedule not in KINDS:
        raise BuildError(str(UnknownNameError.of("pipeline_schedule", schedule, [*KINDS, "a path that ends in .csv"])))
    return KINDS[schedule]


def placement(schedule: str, stages: int, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return the pipeline rank, along ``pp``, of each stage.

    Raises:
        BuildError: the schedule cannot run this number of stages or micro-batches on these ranks.
    """
    kind = _check(schedule, stages, ranks, microbatches)
    if (runs := runnable_schedule(schedule, stages, microbatches)) != schedule:
        message = "schedule %r of fewer micro-batches than stages, %d for %d, runs as %r; with microbatches=%d ranks wait less"
        get_logger().warning(message, schedule, microbatches, stages, runs, stages)
    if is_file(schedule):
        from ._torch_pipelining import placement_in  # noqa: PLC0415  importing torch.distributed.pipelining costs a second

        return placement_in(schedule, stages, ranks, microbatches)
    turns = [stage % (2 * ranks) for stage in range(stages)]
    return tuple(2 * ranks - 1 - turn if kind.folded and turn >= ranks else turn % ranks for turn in turns)


def action_order(schedule: str, stages: int, ranks: int, microbatches: int) -> dict[int, list[PipelineAction]]:
    """Return the computations of each rank in the order in which the engine runs them, without stages or process groups.

    Args:
        schedule: A ``pipeline_schedule``.
        ranks: Number of ranks along ``pp``.

    Raises:
        BuildError: the schedule cannot run this number of stages or micro-batches on these ranks.
    """
    if stages == ranks == 1:
        return one_forward_one_backward(1, microbatches)
    _check(schedule, stages, ranks, microbatches)
    name = runnable_schedule(schedule, stages, microbatches)
    if name == "1f1b":
        return one_forward_one_backward(stages, microbatches)
    if name == "gpipe":
        numbers = range(microbatches)
        return {rank: [PipelineAction(kind, rank, index) for kind in "FB" for index in numbers] for rank in range(ranks)}
    from ._torch_pipelining import order_in, order_of  # noqa: PLC0415  importing torch.distributed.pipelining costs a second

    if is_file(name):
        return order_in(name, stages, ranks, microbatches)
    return order_of(KINDS[name].runtime, stages, ranks, microbatches)


def _check(schedule: str, stages: int, ranks: int, microbatches: int) -> ScheduleKind:
    """Return the kind of a schedule that can run this number of stages and micro-batches on these ranks.

    Raises:
        BuildError: it cannot.
    """
    kind = kind_of(schedule)
    per_rank, rest = divmod(stages, ranks)
    if ranks == 1:
        raise BuildError(f"{stages} stages on a mesh with pp=1; give the mesh's axis pp more ranks, or leave out the cuts")
    if rest:
        number = f"{stages} stage" + "s" * (stages != 1)
        remedy = f"cut the model into a multiple of {ranks} stages, with pipeline({ranks}) or cut_pipeline_stage()"
        raise BuildError(f"{number} on a mesh with pp={ranks}; {remedy}")
    if kind.stages_per_rank not in (None, per_rank):
        others = " or ".join(repr(name) for name, kind in KINDS.items() if kind.stages_per_rank in (None, per_rank))
        raise BuildError(
            f"{stages} stages on a mesh with pp={ranks}, but schedule {schedule!r} has {kind.stages_per_rank} per rank; cut "
            f"the model into {kind.stages_per_rank * ranks} stages, or use {others}"
        )
    if why := _incompatibility(schedule, stages, ranks, microbatches):
        raise BuildError(why)
    return kind


def schedule_for_batch(name: str, program: Program, microbatches: int, rows: int | None) -> tuple[str, int]:
    """Return the pipeline schedule and the number of micro-batches of a batch; warn if they differ from the usual ones.

    Args:
        rows: Number of rows of the batch; None if no tensor has rows.

    Raises:
        BuildError: no schedule runs this number of rows.
    """
    stages = len(program.stages)
    if not rows or rows % microbatches == 0:
        return runnable_schedule(name, stages, microbatches), microbatches
    found = schedule_for_rows(name, stages, program.axis_size("pp"), microbatches, rows)
    how = f"{found[1]} micro-batches, not {microbatches}" + (f", by schedule {found[0]!r}" if found[0] != name else "")
    get_logger().warning("a batch of %d rows runs in %s", rows, how)
    return found


def schedule_for_rows(schedule: str, stages: int, ranks: int, microbatches: int, rows: int) -> tuple[str, int]:
    """Return the schedule and the number of micro-batches for a batch with a given number of rows.

    A batch that ``microbatches`` does not divide, e.g. the last one of an epoch, is split into more and smaller micro-batches;
    with fewer rows than ``microbatches``, into single rows. It runs by a schedule with the same placement of stages.

    Raises:
        BuildError: no such schedule.
    """
    if rows % microbatches == 0:
        return schedule, microbatches
    numbers = [number for number in range(microbatches, rows + 1) if rows % number == 0] or [rows]
    if stages == 1:
        return schedule, numbers[0]
    for name in () if is_file(schedule) else (schedule, _ANY_NUMBER.get(schedule, schedule)):
        for number in numbers:
            if _incompatibility(name, stages, ranks, number) is None:
                return runnable_schedule(name, stages, number), number
    raise BuildError(
        f"{rows} rows cannot be cut into {microbatches} equal micro-batches; give a batch of a multiple of {microbatches} rows"
    )


_ANY_NUMBER = {"1f1b": "gpipe", "interleaved": "looped_bfs", "zero_bubble": "looped_bfs", "dualpipev": "zbv"}
"""Schedules with the same placement of stages that run any number of micro-batches."""


def runnable_schedule(schedule: str, stages: int, microbatches: int) -> str:
    """Return the schedule that runs; 1F1B with fewer micro-batches than stages keeps as many activations as GPipe."""
    return _ANY_NUMBER[schedule] if schedule == "1f1b" and microbatches < stages else schedule


def _incompatibility(schedule: str, stages: int, ranks: int, microbatches: int) -> str | None:
    """Return the reason why a schedule cannot run a number of micro-batches, or None."""
    rounds = max(1, microbatches // ranks)
    if schedule == "dualpipev" and microbatches < stages:
        return (
            f"schedule {schedule!r} needs at least as many micro-batches as stages, got {microbatches} for {stages}; "
            f"use microbatches={stages}, or pipeline_schedule={_ANY_NUMBER[schedule]!r}"
        )
    if schedule in ("interleaved", "zero_bubble") and microbatches % rounds:
        return (
            f"schedule {schedule!r} runs micro-batches in rounds of about pp={ranks} and cannot run {microbatches}; use a "
            f"multiple of {ranks}, or pipeline_schedule={_ANY_NUMBER[schedule]!r}"
        )
    return None
