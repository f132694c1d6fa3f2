"""Stages for the schedules of `torch.distributed.pipelining`. The stages of a `Program` enter; instances of torch's
`PipelineStage` leave, and the gradients of tied parameters are summed between them. `split_policy.py` reads
cuts as torch's own `pipeline()` takes them. The room imports `partition`, `assignment` and `tracing`.

Only the rank of the first stage has the batch, so stages of a `Pipe` pass on the arguments that later stages read.
They sum the gradients of tied parameters after the last backward of their rank: earlier, another rank could still
wait for a tensor of this one.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .split_policy import annotate_split_points
from .stage_runtime import build_stage, sum_tied_gradients

if TYPE_CHECKING:
    from ._torch_private import (
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
    "LossWrapper",
    "MultiUseParameterConfig",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "build_stage",
    "get_submod_name",
    "sum_tied_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module("._torch_private", __name__), name)  # costs a second
