"""Names of ``torch.distributed.pipelining`` that are re-exported unchanged; importing them takes a second."""

from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining._IR import (
    DetachExecutor,
    LossWrapper,
    MultiUseParameterConfig,
    PipeSequential,
    PipeSplitWrapper,
    TrivialLossWrapper,
    get_submod_name,
)
from torch.distributed.pipelining._utils import PipeInfo

__all__ = [
    "DetachExecutor",
    "LossWrapper",
    "MultiUseParameterConfig",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "get_submod_name",
]
