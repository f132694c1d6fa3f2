"""Tests that need exactly one GPU; ``make gpu`` runs them, ``make test`` does not."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule, get_cuda_rng_tracker, init_empty_weights, set_random_seed
from slapo_verify.comparison import assert_equivalent

from .models import DEVICE, KINDS, batch_of, gpt2

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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_slapo_train_agrees_with_its_reference_on_nccl(kind: str, precision: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m slapo train --model {kind} --device cuda --steps 5 --precision {precision}"
    more = ["--reference", "--checkpoint-layers", "--report", str(tmp_path)]
    done = subprocess.run([*command.split(), *more], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same within" in done.stdout


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_trains_as_the_model(kind: str, precision: str) -> None:
    plain, batch = KINDS[kind]().to(DEVICE), batch_of(8)
    model = copy.deepcopy(plain)
    sch = create_schedule(model, example_inputs=batch)
    engine = build(sch, "torch", optimizer=partial(torch.optim.SGD, lr=0.1), precision=precision, microbatches=2)
    limit = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}[precision]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = engine.train_batch(**batch)
        optimizer.zero_grad()
        expected = plain(**batch).loss
        expected.backward()
        optimizer.step()
        assert loss.device.type == DEVICE
        torch.testing.assert_close(loss, expected.detach(), atol=limit, rtol=limit)
        for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad - other.grad).norm() < limit * other.grad.norm(), name


def test_a_checkpoint_of_an_engine_goes_on_exactly(tmp_path: Path) -> None:
    def engine() -> Any:
        sch = create_schedule(gpt2(dropout=0.1).to(DEVICE), example_inputs=batch)
        return build(sch, "torch", optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True), precision="fp16")

    batch = batch_of(8)
    once = engine()
    once.train_batch(**batch)
    once.save(tmp_path / "checkpoint")
    expected = [once.train_batch(**batch).item() for _ in range(2)]
    again = engine()
    again.train_batch(**batch)
    again.load(tmp_path / "checkpoint")
    assert [again.train_batch(**batch).item() for _ in range(2)] == expected


def test_checkpointed_layers_take_less_memory() -> None:
    def peak(checkpointed: bool) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)))
        sch = create_schedule(model.to(DEVICE))
        for layer in sch.select("*") if checkpointed else []:
            layer.checkpoint()
        x = torch.randn(4096, 256, device=DEVICE, requires_grad=True)
        build(sch).module(x).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(checkpointed=True) < 0.4 * peak(checkpointed=False)
