"""What DeepSpeed counts in a process, whose engines of another number of ranks went before."""

from __future__ import annotations

import sys


def count_again(rank: int) -> None:
    """DeepSpeed numbers parameters and modules in a process; one that was alone has counted further than the other one."""
    if "deepspeed" not in sys.modules:  # it has not counted yet, and takes seconds to import
        return
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
