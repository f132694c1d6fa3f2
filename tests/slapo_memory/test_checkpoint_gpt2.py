"""Real Hugging Face models: checkpointed layers compute the same, with and without a key-value cache."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from slapo_core import create_schedule
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.usefixtures("only_memory")


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16))


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=32, attention_dropout=0.1, **sizes))


@pytest.mark.parametrize(
    ("build", "paths"),
    [(gpt2, "transformer.h.*"), (gpt2, "transformer.h.*.attn"), (gpt2, "transformer.h.*.mlp"), (llama, "model.layers.*")],
)
@pytest.mark.parametrize("use_cache", [False, True])
def test_checkpointed_layers_are_equal_in_training(build: object, paths: str, use_cache: bool) -> None:
    before = build().train()
    after = copy.deepcopy(before)
    for layer in create_schedule(after).select(paths):
        layer.checkpoint()
    ids = torch.randint(0, 32, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": use_cache}
    assert_equivalent(before, after, **inputs, loss=lambda out: out.loss)


def test_a_checkpointed_model_still_generates() -> None:
    before = gpt2().eval()
    after = copy.deepcopy(before)
    for layer in create_schedule(after).select("transformer.h.*"):
        layer.checkpoint()
    ids = torch.randint(0, 32, (1, 3))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(before.generate(ids, **options), after.generate(ids, **options))
