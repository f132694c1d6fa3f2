"""Code that the dialects of all engines share: micro-batches, labels, losses, options.

``BatchEngine`` and ``ExternalEngine`` are the bases of engines of other projects, and ``ExactStage`` of pipeline stages.
``StepModel`` tells planners about a step. They are imported when first used, so that loading the plugin stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

from .distributed import gloo_threads as gloo_threads  # waits for them as the process ends

if TYPE_CHECKING:
    from .batch_engine import BatchEngine, MicroBatches
    from .engine_stage_runner import EngineStageRunner, flatten_parameters, initialized_optimizer
    from .engines.exact_stage import ExactStage
    from .engines.split_backward import can_split_backward
    from .external_engine import ExternalEngine
    from .stage_forward import StageForward
    from .stage_memory import CollectiveRecord, MessageSizes, StageMemory
    from .stage_parameters import GradientSize, StageParameters
    from .step_groups import StepGroups, boundary_bytes
    from .step_model import (
        MemoryRules,
        MessageMode,
        OptimizerFactory,
        PipelineAction,
        PipelineChoice,
        ReplicaChoice,
        StageRunner,
        StepFacts,
        StepModel,
        one_forward_one_backward,
    )
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "batch_engine": ["BatchEngine", "MicroBatches"],
            "engine_stage_runner": ["EngineStageRunner", "flatten_parameters", "initialized_optimizer"],
            "engines.exact_stage": ["ExactStage"],
            "engines.split_backward": ["can_split_backward"],
            "external_engine": ["ExternalEngine"],
            "stage_forward": ["StageForward"],
            "stage_memory": ["CollectiveRecord", "MessageSizes", "StageMemory"],
            "stage_parameters": ["GradientSize", "StageParameters"],
            "step_groups": ["StepGroups", "boundary_bytes"],
            "step_model": [
                "MemoryRules",
                "MessageMode",
                "OptimizerFactory",
                "PipelineAction",
                "PipelineChoice",
                "ReplicaChoice",
                "StageRunner",
                "StepFacts",
                "StepModel",
                "one_forward_one_backward",
            ],
        },
    )

__all__ = [
    "BatchEngine",
    "CollectiveRecord",
    "EngineStageRunner",
    "ExactStage",
    "ExternalEngine",
    "GradientSize",
    "MemoryRules",
    "MessageMode",
    "MessageSizes",
    "MicroBatches",
    "OptimizerFactory",
    "PipelineAction",
    "PipelineChoice",
    "ReplicaChoice",
    "StageForward",
    "StageMemory",
    "StageParameters",
    "StageRunner",
    "StepFacts",
    "StepGroups",
    "StepModel",
    "boundary_bytes",
    "can_split_backward",
    "flatten_parameters",
    "initialized_optimizer",
    "one_forward_one_backward",
]
