"""Activations that a layer saves for its backward, with and without a split sequence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_testing import run_distributed
from tests.slapo_sharding.split_families import split

pytestmark = pytest.mark.multiproc

BATCH, LENGTH, WIDTH, INNER = 2, 32, 64, 96


def _llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=128, use_cache=False, **sizes))
    tokens = torch.randint(128, (BATCH, LENGTH))
    return model, {"input_ids": tokens, "labels": tokens}


def _kept(model: nn.Module, batch: dict[str, Any]) -> Counter[int]:
    """Return the sizes of the tensors saved for the backward, without parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    return Counter(
        tensor.untyped_storage().nbytes() // tensor.element_size() for key, tensor in kept.items() if key not in parameters
    )


def _of_one_layer(rank: int, sequence_parallel: bool | None) -> Counter[int]:
    found = []
    for layers in (1, 2):
        model, batch = _llama(layers)
        if sequence_parallel is not None:
            split(model, batch, sequence_parallel)
            model(**batch)  # the first run is checked
        found.append(_kept(model, batch))
    return found[1] - found[0]


def test_saved_activations_are_split() -> None:
    """Each whole value that a layer saves is split, also the inputs of attention and MLP."""
    whole, part = BATCH * LENGTH * WIDTH, BATCH * LENGTH * WIDTH // 2
    plain, sequence = (run_distributed(_of_one_layer, 2, sequence_parallel)[0] for sequence_parallel in (False, True))
    assert plain[whole] == 6
    assert (sequence[whole], sequence[part]) == (0, plain[part] + plain[whole])
