"""Models in stages."""

from slapo_core import analyze_tie_weights, build_program
from slapo_pipeline.analysis import (
    LiveValue,
    PipelineAnalysis,
    analyze_pipeline_module,
    build_pipeline_model,
    generate_pipeline_partition,
    propagate_partition,
)
from slapo_pipeline.describe import describe, stage_code

__all__ = [
    "LiveValue",
    "PipelineAnalysis",
    "analyze_pipeline_module",
    "analyze_tie_weights",
    "build_pipeline_model",
    "build_program",
    "describe",
    "generate_pipeline_partition",
    "propagate_partition",
    "stage_code",
]
