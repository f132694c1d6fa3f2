"""``tensor_parallel(backend=...)``: layers registered by ``slapo_layer_backends`` replace split ones."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import PluginError, Registry, ScheduleError, ShardSpec, build, create_schedule, hookimpl
from slapo_sharding import plugin
from slapo_sharding.communication import collectives
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

PLAN = {"0": "colwise", "2": "rowwise", "3": "rowwise_split_input"}


class Own(nn.Module):
    """Layer of another plugin that runs its own collectives."""

    def __init__(self, module: nn.Linear, kind: str, spec: ShardSpec, sums_gradient: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.kind, self.group, self.sums = module.weight, module.bias, kind, spec.group, sums_gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "columns":
            return F.linear(collectives.all_reduce_grad(x, self.group) if self.sums else x, self.weight, self.bias)
        return collectives.all_reduce(F.linear(x, self.weight), self.group) + self.bias


def own_layer(module: nn.Linear, kind: str, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
    return Own(module, kind, spec, sums_gradient)


def picky(module: nn.Linear, kind: str, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
    return "it is none that I like"


def failing(module: nn.Linear, kind: str, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
    raise ValueError("no such layer here")


def other_weights(module: nn.Linear, kind: str, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
    return nn.Linear(module.in_features, module.out_features)


def _registry(**backends: Any) -> Registry:
    @hookimpl
    def slapo_layer_backends() -> Any:
        return backends.get("all", backends)

    return Registry(
        [
            slapo_tracing.plugin,
            slapo_training.plugin,
            plugin,
            SimpleNamespace(__name__="stranger", slapo_layer_backends=slapo_layer_backends),
        ]
    )


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 4))


def _replaced(rank: int) -> None:
    model, x = _mlp(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=_registry(own=own_layer))
    sch.tensor_parallel(PLAN, backend="own")
    assert [type(model[index]) for index in (0, 2, 3)] == [Own] * 3
    assert "shard" in sch["0"].metadata.primitives
    build(sch)
    assert_equivalent(before, model, x)
    with pytest.raises(ScheduleError, match="already sharded"):
        sch["0"].shard("weight", axis=0)
    sch = create_schedule(model := copy.deepcopy(before), plugins=_registry(own=own_layer))
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch.tensor_parallel({"2": "rowwise"}, backend="own")
    assert [type(model[index]) for index in (0, 2)] == [nn.Linear, Own]
    build(sch)
    assert_equivalent(before, model, x)


@pytest.mark.multiproc
def test_layers_of_a_backend_replace_those_this_step_splits():
    run_distributed(_replaced, 2)


def _refusals(rank: int) -> list[str]:
    said = []
    for backend in (picky, failing, other_weights):
        model = _mlp()
        before = copy.deepcopy(model)
        sch = create_schedule(model, plugins=_registry(strange=backend))
        with pytest.raises((ScheduleError, PluginError)) as caught:
            sch.tensor_parallel(PLAN, backend="strange")
        said.append(str(caught.value).partition(" (")[0])
        assert_equivalent(before, model, torch.ones(2, 4))
    return said


@pytest.mark.multiproc
def test_a_backend_that_fails_or_has_no_layers_changes_nothing():
    none = "has no layer for any that is split: *: it is none that I like; leave out backend"
    expected = [
        f"tensor_parallel(''): backend 'strange' {none}",
        "backend 'strange' failed on a Linear: ValueError: no such layer here",
        "backend 'strange' made a Linear that does not hold the parameters of the layer it is for",
    ]
    assert run_distributed(_refusals, 2) == [expected] * 2


@pytest.mark.parametrize(
    ("backends", "name", "message"),
    [
        (
            {},
            "megatron",
            r"no backend 'megatron'; available: none; 'megatron' comes with slapo-megatron, pip install slapo-megatron",
        ),
        ({}, "megatorn", r"no backend 'megatorn'; did you mean 'megatron'\? available: none"),
        ({"own": own_layer}, "owm", r"no backend 'owm'; did you mean 'own'\? available: 'own'; 'megatron' comes with"),
        ({"own": own_layer}, 3, r"no backend 3; available: 'own'"),
        ({"own": "no_such_module:layer"}, "own", r"backend 'own' of .* cannot be used: .*no_such_module"),
        ({"own": 3}, "own", r"backend 'own' of .* cannot be used: 3 is not a function"),
        ({"all": [own_layer]}, "own", r"slapo_layer_backends of .*stranger.* returned \[.*\]; return \{name: backend\}"),
    ],
)
def test_an_unknown_backend(backends, name, message):
    model = _mlp()
    with pytest.raises((ScheduleError, PluginError), match=message):
        create_schedule(model, plugins=_registry(**backends)).tensor_parallel(PLAN, backend=name)
    assert type(model[0]) is nn.Linear


def test_two_backends_of_one_name():
    one, other = (_registry(own=own_layer).records[-1].plugin for _ in range(2))
    other.__name__ = "another"
    sch = create_schedule(_mlp(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin, one, other]))
    with pytest.raises(PluginError, match="backend 'own' is provided by .* and .*; uninstall one or disable it"):
        sch.tensor_parallel(PLAN, backend="own")


def test_a_split_sequence_has_no_backend():
    sch = create_schedule(_mlp(), plugins=_registry(own=own_layer), example_inputs=(torch.ones(2, 4),))
    with pytest.raises(ScheduleError, match="leave out sequence_parallel, or backend"):
        sch.tensor_parallel(sequence_parallel=True, backend="own")
