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
    from .external_engine import ExternalEngine
    from .stage_forward import StageForward
    from .step_model import (
        MemoryRules,
        MessageMode,
        OptimizerFactory,
        PipelineAction,
        StageMemory,
        StageRunner,
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
            "external_engine": ["ExternalEngine"],
            "stage_forward": ["StageForward"],
            "step_model": [
                "MemoryRules",
                "MessageMode",
                "OptimizerFactory",
                "PipelineAction",
                "StageMemory",
                "StageRunner",
                "StepModel",
                "one_forward_one_backward",
            ],
        },
    )

__all__ = [
    "BatchEngine",
    "EngineStageRunner",
    "ExactStage",
    "ExternalEngine",
    "MemoryRules",
    "MessageMode",
    "MicroBatches",
    "OptimizerFactory",
    "PipelineAction",
    "StageForward",
    "StageMemory",
    "StageRunner",
    "StepModel",
    "flatten_parameters",
    "initialized_optimizer",
    "one_forward_one_backward",
]
