"""Transformers models with gated delta nets: linear attention is split by heads if a plan has styles for it, else named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_core import build, create_schedule, is_sharded
from slapo_testing import run_distributed
from tests.slapo_sharding.logged_warnings import warnings_told

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def made(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if name == "qwen3.5":  # its query projections include gates
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
    dense = [0, 1] if name == "qwen3 next" else []
    config = transformers.Qwen3NextConfig(**SIZES, **EXPERTS, mlp_only_layers=dense, decoder_sparse_step=1)
    return transformers.Qwen3NextForCausalLM(config)


def split(rank: int, names: list[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Compare losses and gradients; return the matrices of attentions that stay whole, and the warnings."""
    found = {}
    for name in names:
        expected = made(name)
        model = copy.deepcopy(expected)
        ids = torch.randint(96, (2, 8))
        sch = create_schedule(model, group=dist.group.WORLD, example_inputs={"input_ids": ids, "labels": ids})
        with warnings_told() as told:
            sch.tensor_parallel()
        build(sch)
        for rows, length in ((2, 8), (3, 12)):
            ids = torch.randint(96, (rows, length))
            losses = [each(input_ids=ids, labels=ids).loss for each in (expected, model)]
            for each, loss in zip((expected, model), losses, strict=True):
                each.zero_grad()
                loss.backward()
            torch.testing.assert_close(losses[0], losses[1])
            for key, gradient in sch.full_state("grad").items():
                torch.testing.assert_close(gradient, expected.get_parameter(key).grad, atol=1e-6, rtol=1e-3)
        whole = [key for key, value in model.named_parameters() if "attn" in key and value.dim() == 2 and not is_sharded(value)]
        found[name] = whole, list(told)
    return found


@pytest.mark.parametrize("dense", [["qwen3.5"], pytest.param(["qwen3.5", "qwen3 next"], marks=pytest.mark.slow)], ids=str)
def test_linear_attention_is_split_by_heads_or_named(dense: list[str]) -> None:
    for found in run_distributed(split, 2, [*dense, "qwen3 next with experts"], timeout=150):
        assert [found[name] for name in dense] == [([], [])] * len(dense)
        whole, told = found["qwen3 next with experts"]
        assert {key.rpartition(".linear_attn.")[0] for key in whole} == {"model.layers.0"}
        assert "model.layers.0.linear_attn stays whole on every rank" in told[0]
