"""Small models of Transformers, and the folders that they are saved in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import slapo

SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
IDS = torch.arange(16).view(2, 8) * 3 % 90 + 3


def config(name: str, **changes: Any) -> Any:
    """``"llama"``, ``"tied"`` of the same class, ``"gpt2"`` or ``"mixtral"``."""
    import transformers

    if name == "gpt2":
        rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return transformers.GPT2Config(
            **{**SIZES, **rates, "n_positions": 32, "n_embd": 32, "n_head": 4, "n_layer": 2, **changes}
        )
    if name == "mixtral":
        return transformers.MixtralConfig(**{**SIZES, **WIDTHS, "num_local_experts": 4, **changes})
    return transformers.LlamaConfig(**{**SIZES, **WIDTHS, "tie_word_embeddings": name == "tied", **changes})


def class_of(name: str) -> Any:
    import transformers

    classes = {"gpt2": "GPT2LMHeadModel", "mixtral": "MixtralForCausalLM"}
    return getattr(transformers, classes.get(name, "LlamaForCausalLM"))


def save(name: str, folder: Path, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """A folder with a model whose every number differs, biases and norms among them."""
    torch.manual_seed(1)
    model = class_of(name)(config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def empty(name: str, **changes: Any) -> Any:
    """The model without numbers."""
    with slapo.init_empty_weights():
        return class_of(name)(config(name, **changes))


def expected(name: str, folder: str | Path) -> Any:
    """Return the model that ``from_pretrained`` loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return class_of(name).from_pretrained(folder)


def logits_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of a batch, and the gradients of its loss."""
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return output.logits.detach(), grads
