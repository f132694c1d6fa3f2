"""Pipeline schedules: what each asks of stages and micro-batches, and on which rank it runs a stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slapo_core.errors import BuildError, UnknownNameError


@dataclass(frozen=True)
class Kind:
    """One pipeline schedule.

    Args:
        runtime: Its class in ``torch.distributed.pipelining``; empty for one that a file gives.
        stages_per_rank: How many stages a rank has; None for any number.
        folded: Whether the stages run down the ranks and back up, so that the first rank has the last stage as well.
        splits: Whether backwards are split: first the gradients of a stage's inputs, later those of its weights.
    """

    runtime: str
    stages_per_rank: int | None = None
    folded: bool = False
    splits: bool = False


KINDS = {
    "1f1b": Kind("Schedule1F1B", 1),
    "gpipe": Kind("ScheduleGPipe", 1),
    "interleaved": Kind("ScheduleInterleaved1F1B"),
    "looped_bfs": Kind("ScheduleLoopedBFS"),
    "zero_bubble": Kind("ScheduleInterleavedZeroBubble", splits=True),
    "zbv": Kind("ScheduleZBVZeroBubble", 2, folded=True, splits=True),
    "dualpipev": Kind("ScheduleDualPipeV", 2, folded=True, splits=True),
}


def is_file(schedule: str) -> bool:
    """Whether a schedule is given by a file, in the CSV format of ``torch.distributed.pipelining``."""
    return schedule.endswith(".csv")


def kind_of(schedule: str) -> Kind:
    """What a ``pipeline_schedule`` is.

    Raises:
        BuildError: no such schedule, or no such file.
    """
    if is_file(schedule):
        if not Path(schedule).is_file():
            raise BuildError(f"pipeline_schedule: there is no file {schedule!r}")
        return Kind("")
    if schedule not in KINDS:
        raise BuildError(str(UnknownNameError.of("pipeline_schedule", schedule, [*KINDS, "a path that ends in .csv"])))
    return KINDS[schedule]


def placement(schedule: str, stages: int, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The pipeline rank of each stage.

    Args:
        schedule: A ``pipeline_schedule``.
        stages: Number of stages of the model.
        ranks: Number of ranks along the axis ``pp``.
        microbatches: Number of micro-batches.

    Raises:
        BuildError: the schedule cannot run so many stages or micro-batches on these ranks.
    """
    kind = kind_of(schedule)
    per_rank, rest = divmod(stages, ranks)
    if ranks == 1:
        raise BuildError(f"{stages} stages on a mesh with pp=1; give the mesh's axis pp more ranks, or leave out the cuts")
    if rest:
        raise BuildError(f"{stages} stages on a mesh with pp={ranks}; cut the model into a multiple of {ranks} stages")
    if kind.stages_per_rank not in (None, per_rank):
        raise BuildError(
            f"{stages} stages on a mesh with pp={ranks}, but schedule {schedule!r} has {kind.stages_per_rank} per rank; cut "
            f"the model into {kind.stages_per_rank * ranks} stages, or use {_with_any_number(per_rank)}"
        )
    _check_microbatches(schedule, stages, ranks, microbatches)
    if is_file(schedule):
        from ._torch_pipelining import placement_in  # noqa: PLC0415  importing torch.distributed.pipelining costs a second

        return placement_in(schedule, stages, ranks, microbatches)
    turns = [stage % (2 * ranks) for stage in range(stages)]
    return tuple(2 * ranks - 1 - turn if kind.folded and turn >= ranks else turn % ranks for turn in turns)


def _with_any_number(per_rank: int) -> str:
    return " or ".join(repr(name) for name, kind in KINDS.items() if kind.stages_per_rank in (None, per_rank))


def _check_microbatches(schedule: str, stages: int, ranks: int, microbatches: int) -> None:
    rounds = max(1, microbatches // ranks)
    if schedule in ("1f1b", "dualpipev") and microbatches < stages:
        raise BuildError(
            f"schedule {schedule!r} needs at least as many micro-batches as stages, got {microbatches} for {stages}; "
            f"use microbatches={stages}, or {'gpipe' if schedule == '1f1b' else 'zbv'!r}"
        )
    if schedule in ("interleaved", "zero_bubble") and microbatches % rounds:
        raise BuildError(
            f"schedule {schedule!r} runs micro-batches in rounds of pp={ranks} or so and cannot deal out {microbatches}; use a "
            f"multiple of {ranks}"
        )
