"""Done when: at least 40 model classes of different families, in train mode, outputs and all gradients equal the original's."""

from __future__ import annotations

import pytest
import torch
import transformers

from slapo_core import TraceError
from slapo_tracing import trace, trace_module
from tests.slapo_tracing.comparison import assert_same
from tests.zoo.families import FAMILIES, layers

WITH_DROPOUT = ("gpt2", "llama", "bert", "t5", "opt", "vit", "albert", "gpt_neox")
HIERARCHICAL = ("gpt2", "llama", "bert", "t5", "bart", "vit", "mixtral", "mamba", "bloom", "clip", "beit")

VARIATIONS = frozenset(
    """
    blenderbot cohere ctrl distilbert electra exaone4 glm gpt2:mask granite granitemoe helium llama:mask marian mbart
    megatron-bert mistral mpnet mt5 nemotron olmo olmo2 olmoe openai-gpt pegasus persimmon plbart qwen2 rembert smollm3
    stablelm starcoder2
    """.split()
)
"""Families that others are like; they are traced when there is time."""

LONG = frozenset(
    """
    convbert deberta deepseek_v3 gemma layoutlm led longt5 mobilebert qwen2_moe qwen3_moe roformer swin switch_transformers
    """.split()
)
"""Families that take long; a pipeline of each is traced in any case, see ``tests/slapo_pipeline/test_families.py``."""


def test_there_are_forty_families() -> None:
    classes = {type(family.make_config()).__name__ for name, family in FAMILIES.items() if name not in VARIATIONS | LONG}
    assert len(classes) >= 40
    assert FAMILIES.keys() >= VARIATIONS | LONG


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in VARIATIONS | LONG else ()) for n in sorted(FAMILIES)]
)
def test_layers_whole_and_flat(name: str) -> None:
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    whole = set(layers(model))
    assert_same(model, trace_module(model, batch, leaf=lambda path, module: path in whole), batch)
    assert_same(model, trace_module(model, batch), batch)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_with_the_same_seed(name: str) -> None:
    model, batch = FAMILIES[name].model(dropout=0.2), FAMILIES[name].batch()
    assert_same(model, trace_module(model, batch), batch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HIERARCHICAL)
def test_every_module_its_own_graph(name: str) -> None:
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    traced = trace(model, example_inputs=batch)
    assert sum(isinstance(module, torch.fx.GraphModule) for module in traced.modules()) > 4
    assert_same(model, traced, batch)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_weights_on_the_meta_device_give_the_same_graph(name: str) -> None:
    family = FAMILIES[name]
    with torch.device("meta"):
        empty = transformers.AutoModel.from_config(family.make_config())
    batch = {key: value for key, value in family.batch().items() if key != "labels"}
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    graph = trace_module(empty.train(), batch).graph
    model = transformers.AutoModel.from_config(family.make_config()).train()
    assert str(graph) == str(trace_module(model, batch).graph)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_gradient_checkpointing_of_the_model_itself() -> None:
    for reentrant in (True, False):
        model, batch = FAMILIES["llama"].model(), FAMILIES["llama"].batch()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        batch["use_cache"] = False
        plain = FAMILIES["llama"].model()
        traced = trace_module(model, batch)
        torch.testing.assert_close(traced(**batch).loss, plain(**batch).loss)


def test_a_model_that_asserts_about_its_inputs_is_refused() -> None:
    config = transformers.ProphetNetConfig(
        vocab_size=64, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4,
        num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    model = transformers.ProphetNetForConditionalGeneration(config).train()
    ids = torch.randint(5, 60, (2, 8))
    with pytest.raises(TraceError, match=r"asks for the values of a tensor \(item\).*modeling_prophetnet.py:\d+"):
        trace_module(model, {"input_ids": ids, "labels": ids})
