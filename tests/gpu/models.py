"""Small models of Transformers, and their batches, on the device that the tests are for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

DEVICE = "cuda"


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": 64, "n_head": 4, "n_layer": 4, "bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, use_cache=False))


def llama() -> nn.Module:
    """Has a buffer, of its rotary embedding, and shares keys and values between heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=32, use_cache=False))


def gpt_neo() -> nn.Module:
    """Has a mask as a buffer in every layer, which its operations need on their device."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"vocab_size": 96, "max_position_embeddings": 32, "hidden_size": 64, "num_layers": 4, "num_heads": 4}
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 8}
    rates = dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0)
    torch.manual_seed(0)
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds, **rates, bos_token_id=1, eos_token_id=1, use_cache=False))


KINDS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "gpt_neo": gpt_neo}
PATHS = {"gpt2": "transformer.h", "llama": "model.layers", "gpt_neo": "transformer.h"}
"""Paths of the models' layers."""


def batch_of(rows: int, device: str = DEVICE) -> dict[str, torch.Tensor]:
    """The same tokens in every process."""
    ids = torch.randint(0, 96, (rows, 32), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids}
