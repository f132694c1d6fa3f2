"""``slapo.utils.decoder_flops`` beside what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from slapo import utils


def decoder(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"vocab_size": 48, "attn_implementation": "eager"}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **sizes, use_cache=False)), {}
    own = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
    }
    model = LlamaForCausalLM(LlamaConfig(**own, **sizes, use_cache=False))
    return model, {"intermediate_size": 40, "gated_mlp": True, "kv_share": 0.5}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    model, options = decoder(kind)
    ids = torch.arange(24).view(3, 8)
    with FlopCounterMode(display=False) as forward:
        model(ids)
    with FlopCounterMode(display=False) as both:
        model(ids, labels=ids).loss.backward()
    sizes = (3, 8, 2, 32, 48)
    few = 0.002 * forward.get_total_flops()  # rotary tables are made by a product
    assert abs(utils.decoder_flops(*sizes, **options, backward=False) - forward.get_total_flops()) <= few
    assert abs(utils.decoder_flops(*sizes, **options) - both.get_total_flops()) <= few
    head = utils.decoder_flops(3, 8, 1, 32, 48, **options, backward=False) * 2 - utils.decoder_flops(
        *sizes, **options, backward=False
    )
    again = utils.decoder_flops(*sizes, **options, ckpt_ratio=1.0) - utils.decoder_flops(*sizes, **options)
    assert again == utils.decoder_flops(*sizes, **options, backward=False) - head
    with pytest.raises(ValueError, match="seq_len is 0; give a size of at least 1"):
        utils.decoder_flops(1, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="ckpt_ratio is 2; give a share from 0 to 1"):
        utils.decoder_flops(1, 1, 1, 1, 1, ckpt_ratio=2)
