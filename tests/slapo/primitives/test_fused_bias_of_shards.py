"""Bias and activation of a layer that is taken apart, fused, and sharded: in whatever order, on two ranks."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import slapo
from slapo_testing import run_distributed

ORDERS = [
    order
    for order in permutations(("decompose", "trace", "fuse", "shard", "sync"))
    if order.index("decompose") < min(order.index("trace"), order.index("fuse")) and order.index("shard") < order.index("sync")
]
PARALLEL = [
    ("tensor_parallel", "decompose", "trace", "fuse"),
    ("decompose", "tensor_parallel", "trace", "fuse"),
    ("decompose", "trace", "tensor_parallel", "fuse"),
    ("decompose", "trace", "fuse", "tensor_parallel"),
]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(F.gelu(self.a(x)))
        return out


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


def bias_tanh_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias, approximate="tanh")


def by_hand(rank: int, orders: list[tuple[str, ...]]) -> None:
    torch.manual_seed(0)
    reference = MLP()
    batches = [{"x": torch.randn(*shape, 16)} for shape in ((2, 4), (2, 4), (3, 5))]
    for order in orders:
        sch = slapo.create_schedule(copy.deepcopy(reference), example_inputs=batches[0])
        for name in order:
            if name == "decompose":
                sch["a"].decompose()
            elif name == "trace":
                sch.trace(flatten=True)
            elif name == "fuse":
                sch.fuse(bias_gelu, compiler="TorchScript", name="fused")
            elif name == "shard":
                sch["a"].shard("weight", axis=0)
                sch["b"].shard("weight", axis=1)
            else:
                sch["a"].sync("bwd_post", "all_reduce")
                sch["b"].sync("fwd_post", "all_reduce")
        compare(sch, reference, batches, 1)


def gpt2(rank: int, orders: list[tuple[str, ...]], sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, activation_function="gelu_pytorch_tanh")
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    reference = GPT2LMHeadModel(config)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    batches = [{"input_ids": torch.randint(64, shape), "use_cache": False} for shape in ((2, 8), (2, 8), (3, 4))]
    for order in orders:
        sch = slapo.create_schedule(copy.deepcopy(reference), example_inputs=batches[0])
        for name in order:
            for block in sch.select("transformer.h.*"):
                if name == "decompose":
                    block["mlp.c_fc"].decompose()
                elif name == "trace":
                    block["mlp"].trace(flatten=True)
                elif name == "fuse":
                    block["mlp"].fuse(bias_tanh_gelu, compiler="TorchScript", name="fused")
            if name == "tensor_parallel":
                sch.tensor_parallel(sequence_parallel=sequence_parallel)
        compare(sch, reference, batches, 2)


def compare(sch: slapo.Schedule, reference: nn.Module, batches: list[dict[str, Any]], fused: int) -> None:
    """Results and gradients of the model as built, of one call after another, the second one in eval mode."""
    assert sum(name.endswith("fused") for name, _ in sch.mod.named_modules()) == fused
    model, _ = slapo.build(sch, init_weights=False)
    for number, batch in enumerate(batches):
        results, gradients = [], []
        for each in (model, reference):
            each.train(number != 1)
            each.zero_grad()
            given = {key: copy.deepcopy(value) for key, value in batch.items()}
            inputs = [
                value.requires_grad_() for value in given.values() if torch.is_tensor(value) and value.is_floating_point()
            ]
            out = each(**given)
            out = out if isinstance(out, torch.Tensor) else out.logits
            out.square().mean().backward()
            results.append(out)
            gradients.append([value.grad for value in inputs])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
        whole = {name: parameter.grad for name, parameter in reference.named_parameters()}
        found = {name: grad for name, grad in sch.full_state("grad").items() if name in whole}
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.multiproc
def test_by_hand_in_any_order() -> None:
    run_distributed(by_hand, 2, ORDERS, timeout=100)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_a_plan_before_between_or_after(sequence_parallel: bool) -> None:
    run_distributed(gpt2, 2, PARALLEL, sequence_parallel, timeout=100)
