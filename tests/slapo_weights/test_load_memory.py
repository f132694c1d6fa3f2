"""The memory that loading takes, as the kernel counts it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import slapo
from slapo_core import ShardSpec, successor
from slapo_testing import run_distributed
from slapo_weights.load import Weights, fill


def peak(rank: int, folder: str, cast: bool) -> int:
    """Bytes of memory that reading a part of a model takes at most, beside what it gives."""
    with slapo.init_empty_weights():
        model = nn.Sequential(*(nn.Linear(4096, 2048, bias=False) for _ in range(8)))
    slapo.create_schedule(model)
    for layer, dim in zip(model, [0, 1] * 4, strict=True):
        spec = ShardSpec(dim, (2048, 4096), 1, 4, ((2048, 4096)[dim],))
        layer.weight = successor(layer.weight, spec.local(layer.weight.detach()), spec=spec)
    fill(copy.deepcopy(model), [], Weights(folder, cast))  # imports, and headers, were read once
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    fill(model, [model], Weights(folder, cast))
    return memory("VmHWM") - before - sum(parameter.nbytes for parameter in model.parameters())


def memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("cast", [False, True])
def test_memory_is_that_of_the_parts_and_of_one_tensors_slice(cast: bool, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if cast else torch.float32
    tensors = {f"{number}.weight": torch.ones(2048, 4096, dtype=dtype) for number in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (extra,) = run_distributed(peak, 1, str(tmp_path), cast)
    assert extra < 2048 * 4096 // 4 * dtype.itemsize + 3 * 2**20  # what the allocator keeps
