"""Memory of the search's candidates against the estimates of their real schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from slapo_plan import Hardware, Plan, plan

LENGTH = 64


def gpt2() -> nn.Module:
    sizes = {"n_layer": 8, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": LENGTH}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False, bos_token_id=1, eos_token_id=2))


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=500, use_cache=False, pad_token_id=0))


def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 500, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False))


def searched(model: Callable[[], nn.Module], constraints: dict[str, Any], mebibytes: float, **options: Any) -> Plan:
    batch = {name: torch.zeros(1, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    ranks = 1
    for axis in ("tp", "pp", "dp"):
        ranks *= constraints.setdefault(axis, 1)
    hardware = replace(Hardware.load("h100"), usable_bytes=int(mebibytes * 2**20))
    with torch.device("meta"):
        made = model()
    return plan(made, batch, ranks=ranks, global_batch=16, hardware=hardware, constraints=constraints, check=0, **options)


ROOMY = 1 << 20
"""Mebibytes with which nothing is recomputed."""
FAST = ("parallel loss", "fsdp, recomputed")
CASES = {
    "one rank": (gpt2, {"rows": 2}, ROOMY),
    "one micro-batch": (gpt2, {"rows": 16}, ROOMY),
    "sequence parallel": (gpt2, {"tp": 2, "rows": 2, "sequence_parallel": True}, ROOMY),
    "tensor parallel": (llama, {"tp": 2, "rows": 2, "sequence_parallel": False}, ROOMY),
    "parallel loss": (llama, {"tp": 2, "rows": 2, "sequence_parallel": False, "parallel_loss": True}, ROOMY),
    "kernels": (llama, {"rows": 2, "kernels": True}, ROOMY),
    "ddp": (gpt2, {"dp": 4, "rows": 2, "data_parallel": "ddp"}, ROOMY),
    "ddp, one micro-batch": (gpt2, {"dp": 4, "rows": 4, "data_parallel": "ddp"}, ROOMY),
    "fsdp": (llama, {"dp": 4, "rows": 2, "data_parallel": "fsdp"}, ROOMY),
    "fsdp, one micro-batch": (gpt2, {"dp": 4, "rows": 4, "data_parallel": "fsdp"}, ROOMY),
    "1f1b": (gpt2, {"pp": 2, "rows": 2, "pipeline_schedule": "1f1b"}, ROOMY),
    "1f1b of four": (llama, {"pp": 4, "rows": 2, "pipeline_schedule": "1f1b"}, ROOMY),
    "1f1b, one micro-batch": (llama, {"pp": 4, "rows": 16, "pipeline_schedule": "1f1b"}, ROOMY),
    "gpipe": (gpt2, {"pp": 2, "rows": 2, "pipeline_schedule": "gpipe"}, ROOMY),
    "interleaved": (gpt2, {"pp": 2, "rows": 2, "pipeline_schedule": "interleaved"}, ROOMY),
    "zbv": (llama, {"pp": 2, "rows": 2, "pipeline_schedule": "zbv"}, ROOMY),
    "pp ddp": (gpt2, {"pp": 2, "dp": 2, "rows": 2, "data_parallel": "ddp", "pipeline_schedule": "1f1b"}, ROOMY),
    "pp fsdp": (gpt2, {"pp": 2, "dp": 2, "rows": 2, "data_parallel": "fsdp", "pipeline_schedule": "1f1b"}, ROOMY),
    "tp pp": (llama, {"tp": 2, "pp": 2, "rows": 2, "sequence_parallel": True, "pipeline_schedule": "1f1b"}, ROOMY),
    "some recomputed": (gpt2, {"rows": 4}, 16),
    "many recomputed": (llama, {"rows": 16}, 20),
    "fsdp, recomputed": (llama, {"dp": 2, "rows": 4, "data_parallel": "fsdp"}, 10),
    "1f1b, recomputed": (gpt2, {"pp": 2, "rows": 2, "pipeline_schedule": "1f1b"}, 9),
    "encoder and decoder": (t5, {"rows": 2}, ROOMY),
    "encoder and decoder, 1f1b": (t5, {"pp": 2, "rows": 2, "pipeline_schedule": "1f1b"}, ROOMY),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES])
def test_memory_of_a_candidate_is_that_of_its_schedule(name: str) -> None:
    model, constraints, mebibytes = CASES[name]
    found = searched(model, dict(constraints), mebibytes)
    exact = found.estimate()
    assert not exact.problems
    ranks = {each.rank: each.peak for each in found.best.stages}
    for each in exact.ranks:
        assert 0.97 <= ranks[each.rank] / each.memory.peak <= 1.07, (str(found.best), ranks[each.rank], each.memory)


SMALL_BUCKETS = {
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 100_000),
    "stage3_prefetch_bucket_size": 10_000,
    "stage3_param_persistence_threshold": 0,
}
DEEPSPEED = {"target": "deepspeed", "config": {"zero_optimization": SMALL_BUCKETS}}
MEGATRON = {"target": "megatron"}
BF16 = {"precision": "bf16"}
ENGINES = {
    "deepspeed": (gpt2, {"tp": 2, "sequence_parallel": False}, DEEPSPEED),
    "deepspeed, bf16": (llama, {}, DEEPSPEED | BF16),
    "deepspeed, 1f1b": (gpt2, {"pp": 2, "dp": 2, "data_parallel": "zero1"}, DEEPSPEED | BF16),
    "zero 1": (llama, {"dp": 2, "data_parallel": "zero1"}, DEEPSPEED),
    "zero 2": (gpt2, {"dp": 2, "data_parallel": "zero2"}, DEEPSPEED | BF16),
    "zero 3": (gpt2, {"dp": 2, "data_parallel": "zero3"}, DEEPSPEED | BF16),
    "megatron": (llama, {"tp": 2, "sequence_parallel": True}, MEGATRON | BF16),
    "megatron, 1f1b": (gpt2, {"pp": 2, "pipeline_schedule": "1f1b"}, MEGATRON | BF16),
    "megatron, interleaved": (llama, {"pp": 2, "pipeline_schedule": "interleaved"}, MEGATRON | BF16),
    "distributed optimizer": (gpt2, {"dp": 2, "data_parallel": "distributed_optimizer"}, MEGATRON | BF16),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "zero 1")) for name in ENGINES])
def test_memory_with_other_engines(name: str) -> None:
    model, constraints, options = ENGINES[name]
    found = searched(model, {"rows": 2, **constraints}, ROOMY, **options)
    exact = found.estimate()
    assert not exact.problems
    ranks = {each.rank: each.peak for each in found.best.stages}
    for each in exact.ranks:
        assert 0.98 <= ranks[each.rank] / each.memory.peak <= 1.1, (str(found.best), ranks[each.rank], each.memory)
