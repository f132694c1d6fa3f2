"""Names of ``torch.distributed.pipelining`` that are re-exported unchanged; importing them takes a second."""

from torch.distributed.pipelining import SplitPoint as SplitPoint
from torch.distributed.pipelining._IR import DetachExecutor as DetachExecutor
from torch.distributed.pipelining._IR import LossWrapper as LossWrapper
from torch.distributed.pipelining._IR import MultiUseParameterConfig as MultiUseParameterConfig
from torch.distributed.pipelining._IR import PipeSequential as PipeSequential
from torch.distributed.pipelining._IR import PipeSplitWrapper as PipeSplitWrapper
from torch.distributed.pipelining._IR import TrivialLossWrapper as TrivialLossWrapper
from torch.distributed.pipelining._IR import get_submod_name as get_submod_name
from torch.distributed.pipelining._utils import PipeInfo as PipeInfo
