"""Stacked experts of Transformers, split along their inner width, equal the unmodified ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_local_experts": 4}
STYLE = {"experts": "moe_tp_experts"}


class Routed(nn.Module):
    """Experts whose routing weights have a gradient and are passed by name."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.router = experts, nn.Linear(16, 4)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return self.experts(x, chosen, weights)


def _experts(kind: str, implementation: str, **sizes: int) -> nn.Module:
    config = {
        "mixtral": lambda: MixtralConfig(**{**SIZES, **sizes}),
        "deepseek": lambda: DeepseekV3Config(**SIZES, moe_intermediate_size=32),
        "gpt_oss": lambda: GptOssConfig(**SIZES),
    }[kind]()
    config._experts_implementation = implementation
    return {"mixtral": MixtralExperts, "deepseek": DeepseekV3Experts, "gpt_oss": GptOssExperts}[kind](config)


def _split(rank: int, ranks: int, kind: str) -> list[tuple[int, ...]]:
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model = Routed(_experts(kind, implementation))
        before = copy.deepcopy(model)
        sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
        sch.tensor_parallel(STYLE)
        build(sch)
        assert_equivalent(before, model, torch.randn(10, 16, requires_grad=True))
        names = {"gate_up_proj", "gate_up_proj_bias", "down_proj"}
        held = {name: parameter for name, parameter in model.experts.named_parameters() if name in names}
        assert all(parameter.numel() * ranks == before.experts.get_parameter(name).numel() for name, parameter in held.items())
    spec = shard_spec(model.experts.gate_up_proj)
    assert spec is not None
    return [spec.blocks]


@pytest.mark.parametrize(("kind", "ranks"), [("mixtral", 2), ("mixtral", 4), ("deepseek", 2), ("gpt_oss", 2), ("gpt_oss", 4)])
def test_correctness_08_gate_and_up_in_every_implementation_of_experts(kind, ranks):
    blocks = [(64,)] if kind == "gpt_oss" else [(32, 32)]  # gate and up in turn, or one behind the other
    assert run_distributed(_split, ranks, ranks, kind) == [blocks] * ranks


def _by_hand(rank: int) -> str:
    model = Routed(_experts("mixtral", "eager"))
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["experts"].shard(["gate_up_proj", "down_proj"], axis=1).sync("fwd_post", "all_reduce")
    with pytest.raises(BuildError) as caught:
        build(sch)
    sch["experts"].sync("bwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, torch.randn(10, 16, requires_grad=True))
    return str(caught.value)


def test_without_the_sum_of_the_router_s_gradient_there_is_no_build():
    assert all("'experts': the gradient of its input is partial" in message for message in run_distributed(_by_hand, 2))


def _training(rank: int, name: str) -> list[tuple[bool, int]]:
    """Train by the published plan, without a batch to derive another from."""
    model, batch = FAMILIES[name].model(), {**FAMILIES[name].batch(), "use_cache": False}
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch.tensor_parallel()
    build(sch)
    assert_equivalent(before, model, **batch)
    for each in (before, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            each(**batch).loss.backward()
            optimizer.step()
    trained = sch.full_state()
    expected = {name: parameter.detach() for name, parameter in before.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(trained, {name: expected[name] for name in trained}, atol=1e-5, rtol=1e-5)
    stacks = {name: p for name, p in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    return [(p.numel() * 2 == expected[name].numel(), p.dim()) for name, p in stacks.items()]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "granitemoe"])
def test_correctness_08_published_plans_split_gate_and_up_of_experts(name):
    for split in run_distributed(_training, 2, name, timeout=120):
        assert len(split) >= 2
        assert set(split) == {(True, 3)}


class Mixing(MixtralExperts):
    """Experts whose gate mixes the inner width."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.softmax(-1) * up


class Scaled(MixtralExperts):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(4))


def _refusals(rank: int) -> list[str]:
    config, messages = MixtralConfig(**SIZES), []
    odd = MixtralConfig(**{**SIZES, "intermediate_size": 9})
    normed, dealt, other = MixtralExperts(config), MixtralExperts(config), MixtralExperts(config)
    normed.has_post_expert_norm = dealt._is_expert_parallel = other.is_transposed = True
    for experts in (Mixing(config), Scaled(config), MixtralExperts(odd), normed, dealt, other):
        sch = create_schedule(Routed(experts), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
        with pytest.raises(ScheduleError) as caught:
            sch.tensor_parallel(STYLE)
        messages.append(str(caught.value))
    sch = create_schedule(
        MixtralSparseMoeBlock(config), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])
    )
    for plan in ({"experts.down_proj": "rowwise"}, {"gate": "moe_tp_experts"}, {**STYLE, "experts.other": "rowwise"}):
        with pytest.raises(ScheduleError) as caught:
            sch.tensor_parallel(plan)
        messages.append(str(caught.value))
    return messages


def test_experts_with_unknown_parts_stay_whole():
    first, second = run_distributed(_refusals, 2)
    assert first == second
    mixing, scaled, odd, normed, dealt, other, alone, gate, absent = first
    assert mixing.startswith(
        "shard('experts'): 'gate_up_proj' cannot be split along 1: the experts' gate mixes their inner width"
    )
    assert "the use of 'scale' in the experts is not known" in scaled
    assert "with a block of 9, not divisible by 2 ranks" in odd
    assert "the norm behind each expert" in normed
    assert "the experts themselves are distributed" in dealt
    assert "'gate_up_proj' and 'down_proj' do not fit together" in other
    assert "'experts.down_proj' is a parameter of 'experts', which has no style 'moe_tp_experts'" in alone
    assert "no sharding rule splits a MixtralTopKRouter this way" in gate
    assert "'experts.other' matches no module" in absent


def _narrow(rank: int) -> str:
    model = Routed(_experts("mixtral", "grouped_mm", intermediate_size=8)).to(torch.bfloat16)
    x = torch.randn(10, 16, dtype=torch.bfloat16)
    assert model(x).shape == (10, 16)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch.tensor_parallel(STYLE)
    build(sch)
    with pytest.raises(BuildError) as caught:
        model(x)
    model.experts.config._experts_implementation = "batched_mm"
    assert model(x).shape == (10, 16)
    return str(caught.value)


def test_shards_too_narrow_for_grouped_mm_are_an_error():
    for message in run_distributed(_narrow, 2):
        assert message.startswith("MixtralExperts 'experts': each rank has 4 of an expert's 8 numbers, 8 bytes, and torch's")
