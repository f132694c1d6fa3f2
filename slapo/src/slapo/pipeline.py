"""Models in stages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slapo_core import build_program
from slapo_pipeline.analysis import LiveValue, PipelineAnalysis, analyze_pipeline_module, module_stages
from slapo_pipeline.describe import Traffic, boundary_bytes, describe, stage_code
from slapo_pipeline.partition import PartitionedModule, StageArguments, analyze_tie_weights, for_any_values
from slapo_pipeline.pipe import Pipe, pipeline
from slapo_pipeline.program_of_pipe import program_of_pipe
from slapo_pipeline.propagation import (
    add_partition_notation,
    build_pipeline_model,
    generate_pipeline_partition,
    propagate_partition,
)
from slapo_pipeline.torch_pipe import annotate_split_points, build_stage, sum_tied_gradients
from slapo_pipeline.tracing import pipe_split

if TYPE_CHECKING:
    from slapo_pipeline.torch_pipe import (
        DetachExecutor,
        LossWrapper,
        MultiUseParameterConfig,
        PipeInfo,
        PipeSequential,
        PipeSplitWrapper,
        SplitPoint,
        TrivialLossWrapper,
        get_submod_name,
    )

__all__ = [
    "DetachExecutor",
    "LiveValue",
    "LossWrapper",
    "MultiUseParameterConfig",
    "PartitionedModule",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "PipelineAnalysis",
    "SplitPoint",
    "StageArguments",
    "Traffic",
    "TrivialLossWrapper",
    "add_partition_notation",
    "analyze_pipeline_module",
    "analyze_tie_weights",
    "annotate_split_points",
    "boundary_bytes",
    "build_pipeline_model",
    "build_program",
    "build_stage",
    "describe",
    "for_any_values",
    "generate_pipeline_partition",
    "get_submod_name",
    "module_stages",
    "pipe_split",
    "pipeline",
    "program_of_pipe",
    "propagate_partition",
    "stage_code",
    "sum_tied_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'slapo.pipeline' has no attribute {name!r}", name=name)
    value = globals()[name] = getattr(
        importlib.import_module("slapo_pipeline.torch_pipe._torch_private"), name
    )  # costs a second
    return value
