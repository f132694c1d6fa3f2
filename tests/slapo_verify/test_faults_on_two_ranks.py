"""Faults in a schedule of two ranks: each is found, on both, and the layer that has it is blamed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.nn.functional import all_gather

from slapo_core import create_schedule
from slapo_testing import run_distributed
from slapo_verify import Report, verify


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product, self.bias = nn.Linear(16, 8, bias=False), nn.Parameter(torch.empty(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.q_norm = nn.LayerNorm(4)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), Down()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def split(sch: Any, fault: str | None) -> None:
    """The right schedule of a block but for the fault."""
    sch["qkv"].shard(["weight", "bias"], axis=0, blocks=1 if fault == "q, k and v mixed" else 3)
    sch["qkv"].sync("bwd_post", "all_reduce")
    sch["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if fault != "gradient of whole weights in parts":
        sch["q_norm"].sync("grad", "all_reduce")
    sch["up"].shard(["weight", "bias"], axis=0)
    if fault != "no sum of the input's gradient":
        sch["up"].sync("bwd_post", "all_reduce")
    sch["down.product"].shard("weight", axis=1)
    if fault == "bias on every rank":
        sch["down"].sync("fwd_post", "all_reduce")
    elif fault != "no sum of the output":
        sch["down.product"].sync("fwd_post", "all_reduce")
    if fault == "summed twice":
        sch["down.product"].sync("fwd_post", "all_reduce")


def planted(rank: int, fault: str | None) -> Report:
    reference = Model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=torch.randn(2, 4, 8))
    for index in range(4):
        split(sch[f"layers.{index}"], fault if index == 2 else None)
    return verify(reference, sch)


FAULTS = {
    "no sum of the output": ("down.product'].shard(", "an all-reduce is missing"),
    "no sum of the input's gradient": ("up'].shard(", "a sync of gradients is missing"),
    "gradient of whole weights in parts": ("qkv'].shard(", "a sync of gradients is missing"),
    "q, k and v mixed": ("qkv'].shard(", None),
    "bias on every rank": ("down'].sync(", "is in it 2 times"),
    "summed twice": ("down.product'].sync(", "2 times what it should be"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_layer_is_blamed_on_all_ranks(fault: str) -> None:
    where, hint = FAULTS[fault]
    one, other = run_distributed(planted, 2, fault)
    print(one)
    assert one == other
    assert not one
    assert one.blame.step.split(": ", 1)[1].startswith(f"sch['layers.2.{where}")
    if hint:
        assert hint in one.blame.hint


def test_the_right_schedule_is_the_same_on_two_ranks() -> None:
    one, other = run_distributed(planted, 2, None)
    assert one == other
    assert one.check().largest.absolute < 1e-4


class Flat(nn.Module):
    """MLP that flattens the output of ``act``, so that a gather along a wrong dimension raises no error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(8, 8), nn.GELU(), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)).flatten(1))


def gathered_along_1(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Gather along dimension 1, which is wrong for a weight sharded along axis 0; ``sync`` itself refuses this."""
    return torch.cat(all_gather(output), 1)


def gathered(rank: int, is_wrong: bool) -> Report:
    reference = Flat()
    sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=torch.randn(2, 4, 8))
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    if is_wrong:
        sch["up"].sync("fwd_post", gathered_along_1)
    else:
        sch["up"].sync("fwd_post", "all_gather", axis=-1)
    return verify(reference, sch)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_parts_gathered_along_another_dimension(is_wrong: bool) -> None:
    one, other = run_distributed(gathered, 2, is_wrong)
    assert one == other
    assert one.ok is not is_wrong
    assert one.ok or one.blame.step.split(": ", 1)[1].startswith("sch['up'].")
