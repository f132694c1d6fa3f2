"""Private names of the engines that dialects override still exist; else the override would silently do nothing."""

from __future__ import annotations

import subprocess
import sys

NAMES = """
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
import deepspeed.ops
from deepspeed.runtime.zero.partition_parameters import Init
assert type(parameter_offload.FWD_MODULE_STACK) is list
assert Init.param_id == 0
assert parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ == ([0],)
names = ["_index_tied_modules", "_synchronize_tied_weights", "get_tied_weights_and_groups"]
assert all(hasattr(PipelineModule, name) for name in names)
assert hasattr(PipelineEngine, "_allocate_or_extend_buffers")
assert hasattr(PipelineEngine, "reset_activation_shape")
assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
assert hasattr(DistributedOptimizer, "_get_model_param_range_map")
assert all(hasattr(random, name) for name in ["_get_cuda_rng_state", "_set_cuda_rng_state"])
assert filesystem_async._results_queue is None
"""


def test_they_are_there() -> None:
    """In a process of its own: both engines warn as they are imported."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NAMES],
        capture_output=True,
        text=True,
        timeout=100,
        env={"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
