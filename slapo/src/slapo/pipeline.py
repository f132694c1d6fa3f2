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

__all__ = [
    "LiveValue",
    "PipelineAnalysis",
    "analyze_pipeline_module",
    "analyze_tie_weights",
    "build_pipeline_model",
    "build_program",
    "generate_pipeline_partition",
    "propagate_partition",
]
