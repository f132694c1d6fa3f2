"""Small random models of many Transformers families, each with a batch.

    family = FAMILIES["llama"]
    model, batch = family.model(), family.batch()

Nothing is downloaded: a model is made from its config class, with sizes of a few dozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCAB = 64
SEQ = 12
BATCH = 2


@dataclass(frozen=True)
class Family:
    """One model class with a tiny config.

    Args:
        name: Transformers' ``model_type``; a suffix after ``:`` tells two entries of one type apart.
        head: The ``Auto`` class that builds it, e.g. ``"AutoModelForCausalLM"``.
        inputs: What a batch holds: ``"text"``, ``"masked"``, ``"seq2seq"``, ``"image"``, ``"speech"``, ``"pair"``.
        config: What the config is made with.
    """

    name: str
    head: str
    inputs: str
    config: dict[str, Any] = field(default_factory=dict)

    def make_config(self, dropout: float = 0.0, depth: int | None = None) -> Any:
        """The config, with every kind of dropout set to ``dropout`` and layer drop off; ``depth`` layers in each stack."""
        from transformers import AutoConfig

        given = self.config if depth is None else _with_depth(self.config, depth)
        config = AutoConfig.for_model(self.name.split(":")[0], **given)
        _set_dropout(config, dropout)
        return config

    def model(self, seed: int = 0, dropout: float = 0.0, depth: int | None = None) -> nn.Module:
        """The model in train mode; equal weights for equal seeds."""
        import transformers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = getattr(transformers, self.head).from_config(self.make_config(dropout, depth))
            with torch.no_grad():
                for parameter in model.parameters():  # zeros would hide what is wired wrongly
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return model.train()

    def batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Keyword arguments of one forward with a loss where the class has one."""
        generator = torch.Generator().manual_seed(seed)
        return _BATCHES[self.inputs](generator)


def layers(model: nn.Module) -> list[str]:
    """Paths of the repeated layers: the members of the outermost module lists."""
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{layer}.") for layer in found):
            found += [f"{path}.{name}" for name, _ in module.named_children()]
    return found


def _with_depth(config: dict[str, Any], depth: int) -> dict[str, Any]:
    counts = (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "num_decoder_layers",
        "encoder_layers",
        "decoder_layers",
    )
    nested = {key: _with_depth(value, depth) for key, value in config.items() if isinstance(value, dict)}
    return {**config, **nested, **{key: depth for key in counts if key in config}}


def _set_dropout(config: Any, dropout: float) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            _set_dropout(value, dropout)
        elif isinstance(value, float) and not isinstance(value, bool) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0 if "layer" in name or "path" in name else dropout)


def _ids(generator: torch.Generator, length: int = SEQ) -> torch.Tensor:
    return torch.randint(5, VOCAB, (BATCH, length), generator=generator)


def _text(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(generator), "labels": _ids(generator)}


def _masked(generator: torch.Generator) -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, -3:] = 0
    return {**_text(generator), "attention_mask": mask}


def _seq2seq(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(generator, 16), "labels": _ids(generator)}


def _image(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}


def _speech(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 32, generator=generator), "labels": _ids(generator)}


def _pair(generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"input_ids": _ids(generator), "pixel_values": pixels, "return_loss": True}  # type: ignore[dict-item]


_BATCHES = {"text": _text, "masked": _masked, "seq2seq": _seq2seq, "image": _image, "speech": _speech, "pair": _pair}

_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_MOE = {**_LLAMA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_BERT = {**_NEOX, "type_vocab_size": 2}
_D_MODEL = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_T5 = {
    **_TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def _causal(name: str, inputs: str = "text", **config: Any) -> Family:
    return Family(name, "AutoModelForCausalLM", inputs, config)


def _encoder(name: str, **config: Any) -> Family:
    return Family(name, "AutoModelForMaskedLM", "masked", config)


def _encoder_decoder(name: str, **config: Any) -> Family:
    return Family(name, "AutoModelForSeq2SeqLM", "seq2seq", config)


def _vision(name: str, **config: Any) -> Family:
    return Family(name, "AutoModelForImageClassification", "image", config)


_ALL = [
    # decoders
    _causal("gpt2", **_GPT),
    _causal("gpt2:mask", inputs="masked", **_GPT),
    _causal("gptj", rotary_dim=4, **_GPT),
    _causal("codegen", rotary_dim=4, n_ctx=32, **_GPT),
    _causal("gpt_bigcode", **_GPT),
    _causal("openai-gpt", **_GPT),
    _causal("ctrl", dff=48, **_GPT),
    _causal(
        "gpt_neo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=32,
        **_TOKENS,
    ),
    _causal("gpt_neox", **_NEOX),
    _causal("opt", ffn_dim=48, word_embed_proj_dim=32, **_NEOX),
    _causal("bloom", hidden_size=32, n_layer=2, n_head=4, **_TOKENS),
    _causal("mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=32, expansion_ratio=2, **_TOKENS),
    _causal("falcon", **_NEOX),
    _causal("biogpt", **_NEOX),
    _causal("xglm", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, max_position_embeddings=32, **_TOKENS),
    _causal("llama", **_LLAMA),
    _causal("llama:mask", inputs="masked", **_LLAMA),
    _causal("mistral", sliding_window=4, **_LLAMA),
    _causal("qwen2", **_LLAMA),
    _causal("qwen3", head_dim=8, **_LLAMA),
    _causal("gemma", head_dim=8, **_LLAMA),
    _causal("gemma2", head_dim=8, sliding_window=4, **_LLAMA),
    _causal("gemma3_text", head_dim=8, sliding_window=4, **_LLAMA),
    _causal("phi", **_LLAMA),
    _causal("phi3", **_LLAMA),
    _causal("starcoder2", **_LLAMA),
    _causal("stablelm", **_LLAMA),
    _causal("olmo", **_LLAMA),
    _causal("olmo2", **_LLAMA),
    _causal("cohere", **_LLAMA),
    _causal("granite", **_LLAMA),
    _causal("nemotron", **_LLAMA),
    _causal("persimmon", **_NEOX),
    _causal("glm", head_dim=8, **_LLAMA),
    _causal("smollm3", **_LLAMA),
    _causal("helium", head_dim=8, **_LLAMA),
    _causal("exaone4", head_dim=8, sliding_window=4, **_LLAMA),
    _causal("mamba", state_size=4, hidden_size=32, num_hidden_layers=2, **_TOKENS),
    _causal("xlnet", d_model=32, n_layer=2, n_head=4, d_inner=48, **_TOKENS),
    # mixtures of experts
    _causal("mixtral", **_MOE),
    _causal("qwen2_moe", shared_expert_intermediate_size=16, **_MOE),
    _causal("qwen3_moe", head_dim=8, **_MOE),
    _causal("olmoe", **_MOE),
    _causal("granitemoe", **_MOE),
    _causal("gpt_oss", head_dim=8, sliding_window=4, **_MOE),
    _causal(
        "deepseek_v3",
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        **{**_MOE, "num_key_value_heads": 4},
    ),
    # encoders
    _encoder("bert", **_BERT),
    _encoder("roberta", **_BERT),
    _encoder("distilbert", dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=32, **_TOKENS),
    _encoder("albert", embedding_size=16, **_BERT),
    _encoder("electra", embedding_size=16, **_BERT),
    _encoder("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], **_BERT),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], **_BERT),
    _encoder("mpnet", **_BERT),
    _encoder("rembert", input_embedding_size=16, output_embedding_size=16, **_BERT),
    _encoder("roformer", embedding_size=32, **_BERT),
    _encoder(
        "squeezebert",
        embedding_size=32,
        q_groups=2,
        k_groups=2,
        v_groups=2,
        post_attention_groups=1,
        intermediate_groups=2,
        output_groups=2,
        **_BERT,
    ),
    _encoder("mobilebert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, **_BERT),
    Family(
        "fnet",
        "AutoModelForMaskedLM",
        "text",
        {"type_vocab_size": 2, **{k: v for k, v in _NEOX.items() if k != "num_attention_heads"}},
    ),
    _encoder("convbert", embedding_size=16, head_ratio=2, num_groups=1, **_BERT),
    _encoder("megatron-bert", **_BERT),
    _encoder("esm", **_BERT),
    _encoder("modernbert", local_attention=4, **_NEOX),
    _encoder("layoutlm", **_BERT),
    # encoder-decoders
    _encoder_decoder("t5", **_T5),
    _encoder_decoder("mt5", **_T5),
    _encoder_decoder("longt5", local_radius=4, **_T5),
    _encoder_decoder("switch_transformers", num_experts=2, **_T5),
    _encoder_decoder("bart", **_D_MODEL),
    _encoder_decoder("mbart", **_D_MODEL),
    _encoder_decoder("pegasus", **_D_MODEL),
    _encoder_decoder("marian", **_D_MODEL),
    _encoder_decoder("blenderbot", **_D_MODEL),
    _encoder_decoder("m2m_100", **_D_MODEL),
    _encoder_decoder("plbart", **_D_MODEL),
    _encoder_decoder(
        "led", attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32, **_D_MODEL
    ),
    # images, sound, pairs
    _vision("vit", **_VIT),
    _vision("beit", use_relative_position_bias=True, **_VIT),
    _vision("dinov2", **{**_VIT, "intermediate_size": None}),
    _vision("swin", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4),
    _vision("convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    _vision(
        "poolformer",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[4, 3],
        strides=[4, 2],
        padding=[1, 1],
    ),
    _vision(
        "segformer",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    Family(
        "whisper",
        "AutoModelForSpeechSeq2Seq",
        "speech",
        {
            **_D_MODEL,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    Family("clip", "AutoModel", "pair", {"text_config": {**_BERT}, "vision_config": {**_VIT}, "projection_dim": 16}),
]

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
