"""What only a GPU can show and one GPU is enough for; ``make gpu`` runs these, ``make test`` does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule, init_empty_weights, set_random_seed
from slapo_core.random import get_cuda_rng_tracker
from slapo_core.testing import assert_equivalent

pytestmark = pytest.mark.gpu


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)).cuda()


def test_a_fork_leaves_the_gpus_generator_as_it_was() -> None:
    set_random_seed(1, tp_rank=0)
    before = torch.cuda.get_rng_state()
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert not torch.equal(torch.rand(4, device="cuda"), inside)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_checkpoint_draws_the_same_dropout_and_casts_alike(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    plain = mlp()
    scheduled = mlp()
    scheduled.load_state_dict(plain.state_dict())
    create_schedule(scheduled).checkpoint()
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        assert_equivalent(plain, scheduled, torch.randn(4, 16, device="cuda"), atol=1e-5 if dtype is None else 1e-2)


def test_weights_made_for_a_gpu_are_those_made_for_a_cpu() -> None:
    def made(device: str) -> torch.Tensor:
        with init_empty_weights():
            model = nn.Linear(8, 8)
        build(create_schedule(model))
        return model.to(device).weight.detach().cpu()

    assert torch.equal(made("cuda"), made("cpu"))


def test_slapo_train_agrees_with_its_reference_on_nccl(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "slapo.cli.app",
        "train",
        "--device",
        "cuda",
        "--steps",
        "5",
        "--reference",
        "--report",
        str(tmp_path),
    ]
    assert subprocess.run(command, timeout=300).returncode == 0
