"""Communication between ranks that does not belong to a single algorithm.

Actions that all ranks take together and that fail on all ranks or on none, process groups, random numbers that are
equal on all ranks, and a process group of one process. A program or a device mesh enters; results of every rank, or
one error on all ranks, leave. This is the lowest room of the package: it imports ``slapo_core`` and torch alone. The
private torch names of the whole package are in ``_torch_private.py``.
"""

from .full_tensors import full_state, original_keys, over_group
from .gradients import clip_grad_norm_, compare_gradients, plain
from .ranks import Ranks, SingleProcessGroup, all_reduce, run_on_all_ranks, stage_group

__all__ = [
    "SingleProcessGroup",
    "Ranks",
    "all_reduce",
    "clip_grad_norm_",
    "compare_gradients",
    "full_state",
    "stage_group",
    "run_on_all_ranks",
    "original_keys",
    "over_group",
    "plain",
]
