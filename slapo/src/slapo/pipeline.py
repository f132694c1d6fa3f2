"""Models in stages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slapo_core import build_program
from slapo_pipeline.analysis import LiveValue, PipelineAnalysis, analyze_pipeline_module, module_stages
from slapo_pipeline.describe import describe, stage_code
from slapo_pipeline.partition.boundary_traffic import Traffic, boundary_bytes
from slapo_pipeline.partition.partitioned_module import PartitionedModule, StageArguments
from slapo_pipeline.partition.tied_parameters import analyze_tie_weights
from slapo_pipeline.pipe import Pipe, pipeline
from slapo_pipeline.program_of_pipe import program_of_pipe
from slapo_pipeline.propagation import (
    add_partition_notation,
    build_pipeline_model,
    generate_pipeline_partition,
    propagate_partition,
)
from slapo_pipeline.torch_pipe.split_points import annotate_split_points
from slapo_pipeline.torch_pipe.stage_runtime import build_stage
from slapo_pipeline.torch_pipe.tied_gradients import sum_tied_gradients
from slapo_pipeline.tracing.pipe_split import pipe_split

if TYPE_CHECKING:
    from slapo_pipeline.torch_pipe._torch_private import (
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
