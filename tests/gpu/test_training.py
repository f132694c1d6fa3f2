"""Optimizers of whole tensors, gradient hooks, injected gradients, statistics and averages on ranks that share one GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import slapo
from slapo_testing import run_distributed
from tests.slapo.gradient_injection import Attach
from tests.strange_optimizers import Lamb, Shampoo

from .models import DEVICE
from .staged import join

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS, DECAY = 3, 0.9


class Block(nn.Module):
    """As nanoGPT's; a router injects the gradient of its balance loss."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.router = heads, nn.LayerNorm(width), nn.Linear(width, 4)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (
            each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in self.qkv(self.norm(x)).split(C, dim=2)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        balance = self.router(x).softmax(-1).square().sum(-1).mean()
        return x + Attach.apply(self.mlp(x), balance)


class Net(nn.Module):
    """Blocks between two projections, with a BatchNorm before the loss if asked."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(6, 32), nn.ModuleList(Block(32, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(32) if has_norm else nn.Identity()
        self.last = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.last(self.norm(h.mean(1))), labels)


def without_first_rows(gradient: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(gradient[:16]), gradient[16:]])


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.02)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return Lamb(parameters, lr=0.01)


def shampoo(parameters: Any) -> torch.optim.Optimizer:
    return Shampoo([each for each in parameters if each.dim() == 2], lr=0.01)


class Case(NamedTuple):
    layout: dict[str, int]
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {}
    has_hook: bool = False
    has_norm: bool = False
    limit: float = 1e-3


FSDP = {"data_parallel": "fsdp"}
CASES = {
    "muon tp": Case({"tp": 2}, muon, limit=0.15),  # iterates in bfloat16, and these gradients are of low rank
    "muon fsdp": Case({"dp": 2}, muon, FSDP, limit=0.15),
    "adafactor tp": Case({"tp": 2}, partial(torch.optim.Adafactor, lr=0.02)),
    "lamb fsdp": Case({"dp": 2}, lamb, FSDP),
    "shampoo tp": Case({"tp": 2}, shampoo),
    "hook tp": Case({"tp": 2}, has_hook=True),
    "hook fsdp": Case({"dp": 2}, options={**FSDP, "microbatches": 2}, has_hook=True),
    "injected dp": Case({"dp": 2}, options={"microbatches": 2}),
    "batch norm dp": Case({"dp": 2}, has_norm=True),
}


def beside_one_process(rank: int, store: str, name: str, device: str) -> dict[str, float]:
    """Return how far the weights and their average are from the unmodified model's, relative to all that steps have added."""
    case = CASES[name]
    join(rank, 2, store)
    if device == "cuda":
        torch.cuda.set_device(0)
    sizes = {"pp": 1, "dp": 1, "tp": 1} | case.layout
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plain, model = (Net(case.has_norm).to(device) for _ in range(2))
    for each in (plain, model) if case.has_hook else ():
        each.get_parameter("blocks.0.qkv.weight").register_hook(without_first_rows)
    before = copy.deepcopy(plain.state_dict())
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 7, 6, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(STEPS)]
    data = [(x.to(device), labels.to(device)) for x, labels in data]
    own = [tuple(each.chunk(sizes["dp"])[mesh["dp"].get_local_rank()] for each in step) for step in data]
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=own[0])
    if sizes["tp"] > 1:
        sch.tensor_parallel()
    if case.has_norm:
        sch.sync_batch_norm()
    engine: Any = slapo.build(sch, "torch", optimizer=case.optimizer, **case.options)
    average = slapo.ema(engine, DECAY)
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer, lost = case.optimizer(list(plain.parameters())), 0.0
    for step, part in zip(data, own, strict=True):
        optimizer.zero_grad()
        expected = plain(*step)
        expected.backward()
        optimizer.step()
        averaged.update_parameters(plain)
        lost = max(lost, abs(engine.train_batch(*part).item() - expected.item()))

    def apart(named: Any) -> float:
        found = sch.full_state("param")
        added = torch.stack([(one - before[name]).norm() for name, one in named]).norm()
        wrong = torch.stack([(found[name] - one).norm() for name, one in named]).norm()
        return (wrong / added).item()

    worst = {"loss": lost, "weights": apart(list(plain.named_parameters()))}
    with average.applied():
        worst["average"] = apart(list(averaged.module.named_parameters()))
    engine.close()
    return worst


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    for worst in run_distributed(beside_one_process, 2, str(tmp_path / "store"), name, DEVICE, timeout=240):
        assert max(worst.values()) < CASES[name].limit, worst
