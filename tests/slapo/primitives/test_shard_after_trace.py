"""Attention sharded by hand before and after it is traced: its graph counts the heads that a rank has."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import slapo
from slapo_testing import run_distributed

Heads = Callable[["Attention", torch.Tensor], torch.Tensor]
HEADS: dict[str, Heads] = {
    "both sizes": lambda self, y: y.view(len(y), y.shape[1], self.num_heads, self.head_dim),
    "heads alone": lambda self, y: y.view(len(y), y.shape[1], self.num_heads, -1),
    "width of a head": lambda self, y: y.view(*y.shape[:2], -1, self.head_dim),
    "divided": lambda self, y: y.reshape(*y.shape[:-1], self.num_heads, y.shape[-1] // self.num_heads),
    "unflatten": lambda self, y: y.unflatten(-1, (self.num_heads, self.head_dim)),
}


class Attention(nn.Module):
    def __init__(self, heads: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.heads = 4, 4, heads
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (HEADS[self.heads](self, layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out: torch.Tensor = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(self, heads: str) -> None:
        super().__init__()
        self.attention, self.head = Attention(heads), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x + self.attention(x))
        return out


def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v)


def shard(sch: slapo.Schedule) -> None:
    for name in ("q", "k", "v"):
        sch[f"attention.{name}"].shard("weight", axis=0)
    sch["attention"].sync("bwd_post", "all_reduce", of=["q", "k", "v"])
    sch["attention.out"].shard("weight", axis=1)
    sch["attention.out"].sync("fwd_post", "all_reduce")


STEPS: dict[str, Callable[[slapo.Schedule], object]] = {
    "shard": shard,
    "trace": lambda sch: sch["attention"].trace(),
    "trace all": lambda sch: sch.trace(),
    "one graph": lambda sch: sch.trace(flatten=True),
    "replace": lambda sch: sch["attention"].replace(core, core),
}
ORDERS = [
    *(("shard", name) for name in STEPS if name != "shard"),
    *((name, "shard") for name in STEPS if name != "shard"),
    ("one graph", "shard", "trace all"),
    ("trace", "shard", "replace"),
]


def check(rank: int) -> None:
    for heads in HEADS:
        torch.manual_seed(0)
        reference = Model(heads)
        batches = [torch.randn(2, 6, 16), torch.randn(3, 4, 16)]
        for order in ORDERS:
            sch = slapo.create_schedule(copy.deepcopy(reference), example_inputs=batches[0])
            for name in order:
                STEPS[name](sch)
            model, _ = slapo.build(sch, init_weights=False)
            for x in batches:
                results, gradients = [], []
                for each in (model, reference):
                    each.zero_grad()
                    given = x.clone().requires_grad_()
                    results.append(each(given))
                    results[-1].square().mean().backward()
                    gradients.append(given.grad)
                torch.testing.assert_close(*results)
                torch.testing.assert_close(*gradients)
                found = sch.full_state("grad")
                torch.testing.assert_close(found, {name: found_in.grad for name, found_in in reference.named_parameters()})


@pytest.mark.slow
@pytest.mark.multiproc
def test_by_hand_in_any_order() -> None:
    run_distributed(check, 2, timeout=100)
