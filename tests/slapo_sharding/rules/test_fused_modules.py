"""``shard`` of a module that replaced layers is refused, or follows the new module's own rule."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, UnknownNameError, build, create_schedule, hookimpl
from slapo_sharding import plugin
from slapo_sharding.rules.sharding_rule import Cut, ShardingRule
from slapo_testing import run_distributed
from slapo_tracing.matching.patterns import call_module
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class LinearRelu(nn.Module):
    """A linear layer fused with its activation."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(x, self.weight, self.bias))


RULE = ShardingRule(
    "LinearRelu",
    lambda module: type(module) is LinearRelu,
    (Cut({"weight": 0, "bias": 0}, "replicated", "sharded"),),
)


def _fused(*plugins: object) -> tuple[nn.Module, Schedule]:
    """Return a schedule whose first layer and activation are one module."""
    model = Net()
    before = copy.deepcopy(model)
    sch = create_schedule(
        model,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin, *plugins]),
        example_inputs=(torch.randn(2, 4),),
    )
    sch.trace()
    (found,) = sch.find(lambda x: F.relu(call_module("up", x)))
    sch.replace(LinearRelu(sch["up"].mod), found, name="fused")
    return before, sch


def _refusals(rank: int) -> list[str]:
    messages = []
    _, sch = _fused()
    steps = len(sch.journal)
    weight = sch["fused"].mod.weight
    for path, error in (("fused", ScheduleError), ("up", UnknownNameError)):
        with pytest.raises(error) as caught:
            sch[path].shard("weight", axis=0)
        messages.append(str(caught.value))
    assert sch["fused"].mod.weight is weight
    assert len(sch.journal) == steps
    return messages


def test_without_a_rule_a_layer_that_was_fused_is_not_sharded_any_more():
    first, second = run_distributed(_refusals, 2)
    assert first == second
    assert "shard('fused'): 'weight' is in a LinearRelu, which no sharding rule covers" in first[0]
    assert "no module 'up'; available: down, fused" in first[1]


def _by_its_rule(rank: int) -> list[int]:
    before, sch = _fused(SimpleNamespace(slapo_shard_rules=hookimpl(lambda: [RULE])))
    sch["fused"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, sch.mod, torch.randn(2, 4, requires_grad=True))
    return list(sch.mod.fused.weight.shape)


def test_with_a_rule_of_its_own_it_is():
    assert run_distributed(_by_its_rule, 2) == [[4, 4]] * 2


def _sharded_then_fused(rank: int) -> str:
    sch = create_schedule(
        Net(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(torch.randn(2, 4),)
    )
    sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["up"].replace(LinearRelu(sch["up"].mod))
    with pytest.raises(BuildError) as caught:
        build(sch)
    return str(caught.value)


def test_a_layer_that_was_sharded_before_it_is_fused_is_told_at_build():
    first, second = run_distributed(_sharded_then_fused, 2)
    assert first == second
    assert "'up': sync('bwd_post', 'all_reduce') adds up what is the same on every rank" in first
    assert "shard it, after any replace" in first
