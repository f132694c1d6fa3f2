"""Attention maps, losses and lengths that a forward stores in attributes of split modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule, is_sharded
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import Net
from tests.slapo_sharding.handwritten_reused import KeepsMap
from tests.slapo_sharding.logged_warnings import warnings_told

pytestmark = pytest.mark.multiproc


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(length))


class Part(KeepsMap):
    """Attention that stores its map, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.mlp(super().forward(x))


class ReadsLength(Net):
    """Model that scales by the length that a block has stored."""

    def forward(self, tokens):
        return super().forward(tokens) * self.blocks[0].part.last["tokens"]


class ReadsMap(Net):
    """Model that adds the entropies of stored attention maps, with a data-dependent step; it is not a graph as a whole."""

    def forward(self, tokens):
        out = super().forward(tokens)
        maps = [block.part.attn_map for block in self.blocks]
        self.largest = out.detach().max().item()
        return out + sum((each * each.log()).mean() for each in maps)


class LeavesLoss(Net):
    """Model that stores its loss and returns its outputs alone, as llama2.c does."""

    def forward(self, tokens):
        out = super().forward(tokens)
        self.last_loss = out.square().mean()
        return out


def run(rank: int, kind: type[Net]) -> tuple[list[str], bool]:
    """Compare outputs, gradients and stored attributes; return the warnings, and if the attention is split."""
    torch.manual_seed(0)
    expected, model = kind(Part), kind(Part)
    model.load_state_dict(expected.state_dict())
    model(tokens(2, 8))  # this stores values with gradients in the attributes
    sch = create_schedule(model, example_inputs=(tokens(2, 8),))
    with warnings_told() as told:
        sch.tensor_parallel()
    build(sch)
    for shape in ((2, 8), (3, 12), (2, 8)):
        torch.testing.assert_close(model(tokens(*shape)), expected(tokens(*shape)), atol=1e-5, rtol=1e-4)
        for each in (expected, model):
            each.zero_grad()
            each(tokens(*shape)).square().mean().backward()
        compare_attributes(rank, expected, model)
    gradients = sch.full_state("grad")
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3)
    return told, is_sharded(model.blocks[0].part.c_attn.weight)


def compare_attributes(rank: int, expected: nn.Module, model: nn.Module) -> None:
    found, whole = (each.blocks[1].part for each in (model, expected))
    assert found.last["tokens"] == whole.last["tokens"]
    torch.testing.assert_close(found.last["mean"], whole.last["mean"], atol=1e-5, rtol=1e-4)
    heads = slice(2 * rank, 2 * rank + 2) if is_sharded(found.c_attn.weight) else slice(None)
    torch.testing.assert_close(found.attn_map, whole.attn_map[:, heads], atol=1e-5, rtol=1e-4)
    assert found.attn_map.requires_grad
    if hasattr(model, "last_loss"):
        torch.testing.assert_close(model.last_loss, expected.last_loss, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [LeavesLoss, pytest.param(ReadsLength, marks=pytest.mark.slow), ReadsMap])
def test_attributes_stored_by_a_forward(kind: Any) -> None:
    for told, is_split in run_distributed(run, 2, kind):
        parts = [
            message for message in told if "the attribute 'attn_map' of 'blocks.0.part' holds this rank's shard" in message
        ]
        assert (len(parts), is_split) == {LeavesLoss: (1, True), ReadsLength: (0, False), ReadsMap: (0, False)}[kind]
