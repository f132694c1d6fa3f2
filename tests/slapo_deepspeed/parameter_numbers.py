"""Reset of DeepSpeed's counters in a process that ran engines on another number of ranks before."""

from __future__ import annotations

import sys


def count_again(rank: int) -> None:
    """Reset DeepSpeed's numbers of parameters and modules, which are higher in a process that also ran alone."""
    if "deepspeed" not in sys.modules:  # no numbers yet, and the import takes seconds
        return
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
