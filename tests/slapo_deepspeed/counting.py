"""What DeepSpeed counts in a process, whose engines of another number of ranks went before."""

from __future__ import annotations


def count_again(rank: int) -> None:
    """DeepSpeed numbers parameters and modules in a process; one that was alone has counted further than the other one."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
