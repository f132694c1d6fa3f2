"""Hook implementations of slapo-pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slapo_core import hookimpl

if TYPE_CHECKING:
    from slapo_core import Program, Schedule


@hookimpl
def slapo_primitives() -> dict[str, str]:
    return {
        "cut_at_marks": "slapo_pipeline.cut_at_marks:CutAtMarksPrimitive",
        "cut_pipeline_stage": "slapo_pipeline.cut_pipeline_stage:CutPipelineStagePrimitive",
        "pipeline": "slapo_pipeline.pipeline:PipelinePrimitive",
    }


@hookimpl
def slapo_partition(schedule: Schedule) -> Program | None:
    from .partition.partitioner import partition  # noqa: PLC0415  finding plugins must stay cheap
    from .program_of_pipe import program_of_pipe_option  # noqa: PLC0415
    from .propagation import partitioned_program  # noqa: PLC0415

    return program_of_pipe_option(schedule) or partitioned_program(schedule) or partition(schedule)


@hookimpl(trylast=True)
def slapo_before_build(schedule: Schedule, config: dict[str, Any]) -> None:
    from .program_of_pipe import store_pipe_option  # noqa: PLC0415

    store_pipe_option(schedule, config)
