"""Small Transformers models of many classes, each with a batch, and where to cut them.

model, batch = small("LlamaForCausalLM")
paths = places(model, batch, stages=4)
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.zoo import families as zoo

SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "d_embed", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "encoder_hidden_size", "input_embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "dff", "d_inner", "ffn_dim", "n_inner", "hidden_dim"), 48),
    **dict.fromkeys(("ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_intermediate_size"), 48),
    "projection_dim": 16,
    "hidden_size_per_layer_input": 8,
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk", "num_experts_per_token", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    # recurrences
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_expand": 2,
    "n_groups": 1,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    # text
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window", "local_radius"), 4),
    "chunk_size": 8,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
    # images and sound
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
"""Sizes of a config, used for each field that it has."""

SPEECH = "Data2VecAudio Hubert SEW SEWD UniSpeech UniSpeechSat Wav2Vec2 Wav2Vec2Conformer WavLM".split()

LISTS = (nn.ModuleList, nn.Sequential)

SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
TWO_WIDTHS = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
FOUR = {"num_key_value_heads": 4}

MORE: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM": {"decoder_layers": 4} for name in "Bart BigBirdPegasus Blenderbot BlenderbotSmall".split()},
    **{f"{name}ForCausalLM": {"decoder_layers": 4} for name in "Marian MBart Mvp Pegasus PLBart TrOCR Whisper".split()},
    **{f"{name}For{task}": {"apply_spec_augment": False} for name in SPEECH for task in ("SequenceClassification", "CTC")},
    **dict.fromkeys(
        ("BigBirdForCausalLM", "BigBirdForMaskedLM", "BigBirdPegasusForConditionalGeneration"),
        {"attention_type": "original_full"},
    ),
    "ConvNextV2ForImageClassification": {**TWO_WIDTHS, "num_stages": 2},
    "DonutSwinForImageClassification": SWIN,
    "Dots3NoteForCausalLM": FOUR,
    "EsmcForMaskedLM": FOUR,
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MllamaForCausalLM": {"num_hidden_layers": 5},
    "ProphetNetForCausalLM": {"num_decoder_layers": 4},
    "RegNetForImageClassification": {**TWO_WIDTHS, "groups_width": 4},
    "RoCBertForCausalLM": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "RoCBertForMaskedLM": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "Swinv2ForImageClassification": SWIN,
    **dict.fromkeys(
        ("Wav2Vec2ConformerForSequenceClassification", "Wav2Vec2ConformerForCTC"),
        {"apply_spec_augment": False, "max_source_positions": 64},
    ),
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Further sizes by the name of the class."""

ZOO: dict[str, dict[str, Any]] = {
    "albert": {"num_hidden_layers": 4, "num_hidden_groups": 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "convnext": {"depths": [2, 2]},
    "resnet": {"depths": [2, 2]},
    "segformer": {"depths": [2, 2]},
    "swin": {"depths": [2, 2]},
}
"""The same for families of the zoo, by the name of the family; the others get four layers in all."""


VARIATIONS = frozenset(
    """
    biogpt blenderbot codegen esm exaone4 glm gpt2:mask granite helium layoutlm llama:mask marian mbart megatron-bert mt5
    nemotron olmo olmoe pegasus persimmon plbart rembert smollm3 starcoder2
    """.split()
)
"""Families of the zoo that others are like."""

FAST = ("XLMWithLMHeadModel", *(name for name in zoo.FAMILIES if name not in VARIATIONS))

NAMED = {
    "ForCausalLM": """
        AXK1 Afmoe Apertus Arcee AriaText BailingHybrid Bamba Bart Beam BigBird BigBirdPegasus BitNet Blenderbot
        BlenderbotSmall Camembert Cohere2 Cohere2Moe CpmAnt Cwm Data2VecText DeepseekV2 DeepseekV4 DiffLlama Doge
        Dots1 Electra Emu3 Ernie Ernie4_5 Ernie4_5_Moe ExaoneMoe FalconH1 FalconMamba FlexOlmo Flint GPTNeoXJapanese
        Gemma4 Gemma4Unified Glm4 Glm4Moe Glm4MoeLite GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3
        HYV4 HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Inkling Inkling2 Jais2 Jamba JetMoe Kolibri1 Laguna Lfm2
        Lfm3 Llama4 MBart Mamba2 Marian MegatronBert Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 MiniMaxM3VL
        Ministral Ministral3 Mllama ModernBertDecoder Mvp NanoChat NemotronH Olmo3 OlmoHybrid PLBart Pegasus
        Phi4Multimodal Phimoe ProphetNet Qwen3Next Qwen3_5 Qwen3_5Moe RecurrentGemma RemBert RoCBert RoFormer Roberta
        RobertaPreLayerNorm Rwkv SeedOss SolarOpen TrOCR VaultGemma Whisper XLMRoberta XLMRobertaXL Youtu Zaya xLSTM
    """,
    "ForMaskedLM": """
        BigBird Camembert Data2VecText Ernie Esmc EuroBert Funnel Gte IBert JinaEmbeddingsV3 Longformer Mra NomicBert
        Nystromformer RoCBert RobertaPreLayerNorm Tapas Ultrabert XLMRoberta XLMRobertaXL Yoso
    """,
    "ForConditionalGeneration": "BigBirdPegasus BlenderbotSmall Mvp NllbMoe PegasusX ProphetNet T5Gemma UMT5",
    "ForImageClassification": """
        CLIP ConvNextV2 Data2VecVision DeiT Dinov2WithRegisters DonutSwin IJepa MetaClip2 MobileNetV1 MobileNetV2
        MobileViT PvtV2 RegNet Siglip SwiftFormer Swinv2 ViTMSN
    """,
    "ForSequenceClassification": " ".join(SPEECH),
    "ForCTC": " ".join(SPEECH),
    "": """
        BertLMHeadModel BertGenerationDecoder FlaubertWithLMHeadModel SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
        XLMWithLMHeadModel
    """,
}
"""Classes beyond the zoo by the end of their names, without it."""

CLASSES = (*zoo.FAMILIES, *(f"{name}{end}" for end, names in NAMED.items() for name in names.split()))
"""Models that can be cut: families of the zoo, and classes by their names."""


IN_TWO = ("FlaubertWithLMHeadModel", "XLMWithLMHeadModel")
"""Classes that are cut behind their last attention only: they always make a cache, and all attentions use it."""


class Refused(NamedTuple):
    """Why a class is refused, and a part of the message."""

    why: str
    told: str


REFUSED = {
    "BigBirdForMaskedLM:block_sparse": Refused(
        "it replaces its attention at the first short sequence; set attention_type='original_full'",
        "comes from code that tracing does not see",
    ),
    "Wav2Vec2ForSequenceClassification:SpecAugment": Refused(
        "it draws what it masks; set apply_spec_augment=False", "draws random numbers from Python or NumPy"
    ),
}
"""Classes that cannot be cut, and the message that says why."""


def small(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in train mode without dropout and without a cache, and a batch with labels.

    Args:
        name: Of a class, or of a family of the zoo; a suffix after ``:`` tells two entries of one class apart.
    """
    model, batch = _of_zoo(name) if name in zoo.FAMILIES else _of_class(name)
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
    return model, batch


def class_name(name: str) -> str:
    """Name of the class of a family or class."""
    if name not in zoo.FAMILIES:
        return name.split(":")[0]
    with torch.device("meta"):
        return type(zoo.FAMILIES[name].model()).__name__


def places(model: nn.Module, batch: dict[str, Any], stages: int) -> list[str]:
    """Cuts into about equal numbers of the layers that run, in the order of execution.

    Layers are the members of the outermost module lists; where these are fewer than the stages, those of the lists inside.
    """
    model = copy.deepcopy(model)  # some change themselves when they run first
    for depth in range(4):
        ran = _in_order(model, batch, list(_members(model, depth)))
        if len(ran) >= stages:
            break
    assert len(ran) >= stages, f"{len(ran)} layers"
    return [ran[len(ran) * number // stages - 1] for number in range(1, stages)]


def _members(module: nn.Module, depth: int, prefix: str = "") -> Iterator[str]:
    """Paths of the members of module lists that lie in ``depth`` others, or in fewer where there are no more."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not isinstance(module, LISTS) or isinstance(child, LISTS):
            yield from _members(child, depth, f"{path}.")
        elif depth and (inner := list(_members(child, depth - 1, f"{path}."))):
            yield from inner
        elif not type(child).__module__.startswith("torch.nn."):
            yield path


def _in_order(model: nn.Module, batch: dict[str, Any], paths: list[str]) -> list[str]:
    ends: list[str] = []
    hooks = [  # of what is in them too, for models that call their layers' forward
        module.register_forward_hook(lambda *_, path=path: ends.append(path))
        for path in paths
        for module in model.get_submodule(path).modules()
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(reversed(ends)))[::-1]


def _of_zoo(name: str) -> tuple[nn.Module, dict[str, Any]]:
    known = zoo.FAMILIES[name]
    given = dataclasses.replace(known, config={**known.config, **ZOO.get(name, {})})
    depth = None if name in ZOO or known.inputs in ("seq2seq", "speech", "pair") else 4
    return given.model(depth=depth), known.batch()


def _of_class(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    cls = getattr(transformers, name.split(":")[0])
    config = small_config(cls.config_class, MORE.get(name, {}))
    zoo._set_dropout(config, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).train(), batch_for(cls.__name__)


def small_config(cls: Any, more: dict[str, Any]) -> Any:
    """A config of this class with ``SIZES`` and ``more``, the configs inside of it too."""
    fields = inspect.signature(cls).parameters
    given = {name: value for name, value in SIZES.items() if name in fields and _fits(value, fields[name].default)}
    for name, inner in (cls.sub_configs or {}).items():
        if name in fields and inspect.signature(inner).parameters.keys() & SIZES.keys():
            given[name] = small_config(inner, more.get(name, {})).to_dict()
    return cls(**{**given, **{name: value for name, value in more.items() if name not in (cls.sub_configs or {})}})


def _fits(value: Any, default: Any) -> bool:
    """Return whether both are numbers, or neither is."""
    return default in (None, inspect.Parameter.empty) or isinstance(value, int) == isinstance(default, (int, float))


def batch_for(name: str) -> dict[str, Any]:
    """A batch with labels for a class."""
    generator = torch.Generator().manual_seed(0)
    if name.endswith("ForImageClassification"):
        return zoo._image(generator)
    if name.endswith(("ForCTC", "ForSequenceClassification", "ForAudioClassification")):
        labels = torch.tensor([0, 1]) if not name.endswith("ForCTC") else torch.randint(3, 60, (2, 6), generator=generator)
        return {"input_values": torch.randn(2, 400, generator=generator), "labels": labels}
    if name.endswith(("ForMaskedLM", "PreTraining")):
        return zoo._masked(generator)
    if name.endswith(("ForConditionalGeneration", "ForSeq2SeqLM")):
        return zoo._seq2seq(generator)
    return zoo._text(generator)
