"""Unmodified Transformers models, cut, in training mode: equal, with nothing sent that need not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .stage_comparison import assert_same_as_model, received

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, -3:] = 0
TEXT = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.clone()}
HIDDEN = (2, 12, 32)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _model(name: str, **sizes: Any) -> nn.Module:
    import transformers

    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**sizes)).train()


@pytest.mark.parametrize(
    ("name", "layers", "extra"),
    [
        ("BertForMaskedLM", "bert.encoder.layer", {}),
        ("RobertaForMaskedLM", "roberta.encoder.layer", {}),
        ("LlamaForCausalLM", "model.layers", {"num_key_value_heads": 1, "use_cache": False}),
        ("Qwen2ForCausalLM", "model.layers", {"num_key_value_heads": 1, "use_cache": False, "tie_word_embeddings": True}),
        ("Gemma2ForCausalLM", "model.layers", {"num_key_value_heads": 1, "head_dim": 16, "use_cache": False}),
        ("GPTNeoXForCausalLM", "gpt_neox.layers", {"use_cache": False}),
        ("OPTForCausalLM", "model.decoder.layers", {"ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}),
    ],
)
def test_only_hidden_states_cross(name: str, layers: str, extra: dict[str, Any]) -> None:
    program = assert_same_as_model(_model(name, **SIZES, **extra), TEXT, f"{layers}.0", f"{layers}.1")
    assert received(program) == [[HIDDEN], [HIDDEN]]


def test_gpt2_with_tied_embeddings_and_dropout() -> None:
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    program = assert_same_as_model(
        _model("GPT2LMHeadModel", **sizes, use_cache=False), TEXT, "transformer.h.0", "transformer.h.1"
    )
    assert received(program) == [[HIDDEN], [HIDDEN]]
    (tie,) = program.ties
    assert tie.names == ("transformer.wte.weight", "lm_head.weight")
    assert tie.stages == (0, 2)


T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("paths", "crossing"),
    [
        (("encoder.block.0", "decoder.block.0"), [1, 2]),
        (("encoder.block.0", "encoder", "decoder.block.0"), [1, 1, 2]),
    ],
)
def test_cuts_inside_encoder_and_decoder(paths: tuple[str, ...], crossing: list[int]) -> None:
    model = _model("T5ForConditionalGeneration", **T5, use_cache=False)
    program = assert_same_as_model(model, TEXT, *paths)
    assert [len(shapes) for shapes in received(program)] == crossing
    assert program.ties[0].names[0] == "shared.weight"


def test_vision() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    model = _model("ViTForImageClassification", **sizes, image_size=32, patch_size=8)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    assert received(assert_same_as_model(model, inputs, "vit.layers.0")) == [[(2, 17, 32)]]


def test_a_cache_is_refused() -> None:
    from slapo_core import TraceError

    with pytest.raises(TraceError, match="a DynamicCache is used by stages 0 and 1, .*use_cache=False"):
        assert_same_as_model(_model("LlamaForCausalLM", **SIZES, num_key_value_heads=1), TEXT, "model.layers.0")


def test_experts_whose_kernels_have_no_fake_are_cut_with_weights_on_meta() -> None:
    sizes = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 2, "use_cache": False}
    inputs = {"input_ids": IDS, "labels": IDS}
    program = assert_same_as_model(_model("MixtralForCausalLM", **sizes), inputs, "model.layers.1")
    program.module.to("meta")
    assert program.replan is not None
    assert received(program.replan(False, {name: ids[:1] for name, ids in inputs.items()})) == [[(1, 12, 32)]]
