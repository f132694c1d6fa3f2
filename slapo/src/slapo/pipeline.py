"""Models in stages."""

from slapo_core import analyze_tie_weights, build_program
from slapo_pipeline.analysis import (
    LiveValue,
    PipelineAnalysis,
    analyze_pipeline_module,
    module_stages,
)
from slapo_pipeline.describe import describe, stage_code
from slapo_pipeline.partitioned import PartitionedModule, StageArguments
from slapo_pipeline.pipe_split import pipe_split
from slapo_pipeline.propagation import (
    add_partition_notation,
    build_pipeline_model,
    generate_pipeline_partition,
    propagate_partition,
)
from slapo_pipeline.ready_pipe import program_of_pipe
from slapo_pipeline.stage_runtime import build_stage
from slapo_pipeline.tied_gradients import sum_tied_gradients
from slapo_pipeline.traffic import Traffic, boundary_bytes

__all__ = [
    "LiveValue",
    "PartitionedModule",
    "PipelineAnalysis",
    "StageArguments",
    "Traffic",
    "add_partition_notation",
    "analyze_pipeline_module",
    "analyze_tie_weights",
    "boundary_bytes",
    "build_pipeline_model",
    "build_program",
    "build_stage",
    "describe",
    "generate_pipeline_partition",
    "module_stages",
    "pipe_split",
    "program_of_pipe",
    "propagate_partition",
    "stage_code",
    "sum_tied_gradients",
]
