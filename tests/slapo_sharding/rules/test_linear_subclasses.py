"""Subclasses of Linear with an own forward are split only if it computes a Linear."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.falcon.modeling_falcon import FalconLinear

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_sharding.rules.layers import is_linear
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent


class Calls(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


class Transposed(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = torch.matmul(input, self.weight.transpose(0, 1))
        return product if self.bias is None else torch.add(product, self.bias)


class Clamped(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-65000, 65000)


class LooksAtShape(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.shape[0] < 100 else input.new_zeros(input.shape[0], self.out_features)


class LooksAtWidth(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.out_features < 100 else super().forward(input + 1)


class InTraining(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + input) if self.training else super().forward(input)


class WithoutGradient(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().forward(input)


class TwoBiases(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.bias


class Scaled(nn.Linear):
    """Computes a Linear only while it has no scale."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) + getattr(self, "scale", torch.tensor(0.0))


class Defaulted(nn.Linear):
    def forward(self, input: torch.Tensor, offset: Any = None) -> torch.Tensor:
        return super().forward(input if getattr(self, "offset", None) is None else input + self.offset)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, FalconLinear, Calls, Transposed])
def test_a_forward_that_is_a_linear_one(kind, bias):
    assert is_linear(kind(4, 6, bias=bias))
    with torch.device("meta"), torch.no_grad():
        assert is_linear(kind(4, 6, bias=bias))


@pytest.mark.parametrize("kind", [Clamped, LooksAtShape, LooksAtWidth, InTraining, WithoutGradient, TwoBiases, Scaled])
def test_a_forward_that_is_not_or_might_not_be(kind):
    assert not is_linear(kind(4, 6))


def test_a_module_with_more_than_weight_and_bias_has_no_rule():
    layer = Defaulted(4, 6)
    assert is_linear(layer)
    layer.offset = torch.ones(4)
    assert not is_linear(layer)
    child = Defaulted(4, 6)
    child.offset = nn.Identity()
    assert not is_linear(child)


def test_the_random_numbers_are_as_before():
    class Fresh(Calls):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    torch.manual_seed(0)
    layer, state = Fresh(4, 6), torch.get_rng_state()
    assert is_linear(layer)
    assert torch.equal(torch.get_rng_state(), state)


def _split(rank: int) -> None:
    model = nn.Sequential(FalconLinear(8, 16), nn.GELU(), FalconLinear(16, 8))
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, torch.randn(2, 3, 8, requires_grad=True))


@pytest.mark.multiproc
def test_correctness_02_falcon_s_linear_adds_its_bias_once():
    run_distributed(_split, 2)
