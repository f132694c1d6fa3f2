"""A language model of any type Transformers knows, from a config with small sizes.

Types that have no causal language model, as T5 has none, get their encoder-decoder: it reads the text and is taught to say it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig  # noqa: TID253
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: TID253
from transformers.utils import logging  # noqa: TID253

from slapo_core import UnknownNameError

from ..run_data.settings import VOCABULARY, Settings, SettingsError, is_folder
from .model_folder import KNOWN, check_positions, error_clause, folder_config, unknown_type

ALIASES = {
    "layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_decoder_layers",
        "encoder_layers",
        "decoder_layers",
    ),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "seq": ("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "context_length"),
}
"""Flag to the attribute names configs use for it; a config's own ``attribute_map`` is followed as well."""

INNER = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "d_ff",
    "moe_intermediate_size",
)
"""Attribute names of the feed-forward size: 4 x hidden."""


def build_model(settings: Settings) -> nn.Module:
    """The unmodified model in fp32 and train mode; on the current default device, with random weights from the current seed.

    Raises:
        UnknownNameError: no such model type.
        SettingsError: the config has no attribute for a size, or Transformers refuses the sizes.
    """
    config = build_config(settings)
    try:
        model: nn.Module = auto_class(config).from_config(config, dtype=torch.float32)
    except Exception as err:
        raise SettingsError(
            f"--model {settings.model}: transformers cannot build it with these sizes: {error_clause(err)}; try other sizes"
        ) from err
    return model.train()


def auto_class(config: PretrainedConfig) -> Any:
    """Return Transformers' class that makes the language model of a config."""
    return AutoModelForCausalLM if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForSeq2SeqLM


def build_config(settings: Settings) -> PretrainedConfig:
    """The config of ``settings.model`` with the settings' sizes and a vocabulary of bytes; a folder's has its own."""
    if is_folder(settings.model):
        return _config_of_folder(settings)
    if settings.model not in KNOWN:
        raise UnknownNameError(f"--model {settings.model}: {unknown_type(settings.model)}")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(settings.model)
    changes = _sizes(config, settings) | _dependent_sizes(config, settings) | _tokens(config) | _dropouts(config, settings)
    try:
        return type(config)(**{**changes, "use_cache": False})
    except Exception as err:
        raise SettingsError(
            f"--model {settings.model}: its config refuses these sizes: {error_clause(err)}; try other sizes"
        ) from err


def _config_of_folder(settings: Settings) -> PretrainedConfig:
    config = folder_config(settings.model)
    check_positions(config, settings)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    for name, value in {**_dropouts(config, settings), "use_cache": False}.items():
        setattr(config, name, value)
    return config


def _sizes(config: PretrainedConfig, settings: Settings) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for flag, aliases in ALIASES.items():
        names = _accepted_names(config, aliases)
        if not names and flag != "seq":  # models with relative positions have no longest sequence
            raise SettingsError(
                f"--model {settings.model}: its config has none of {', '.join(aliases)}, so --{flag} cannot be set; "
                "use another model"
            )
        changes |= dict.fromkeys(names, getattr(settings, flag))
    return changes


def _dependent_sizes(config: PretrainedConfig, settings: Settings) -> dict[str, Any]:
    changes: dict[str, Any] = dict.fromkeys(_accepted_names(config, INNER), 4 * settings.hidden)
    changes |= dict.fromkeys(_accepted_names(config, ("word_embed_proj_dim", "embedding_size")), settings.hidden)
    if not hasattr(config, "qk_rope_head_dim"):  # latent attention has head sizes of its own, independent of hidden
        changes |= dict.fromkeys(_accepted_names(config, ("head_dim", "rotary_dim", "d_kv")), settings.hidden // settings.heads)
    for name in _accepted_names(config, ("num_key_value_heads", "num_kv_heads")):
        changes[name] = _key_value_heads(getattr(config, name), config.num_attention_heads, settings)
    return changes | _layer_types(config, settings.layers)


def _layer_types(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """Repeat the family's pattern where a config has one entry per layer and does not work it out itself."""
    if kinds := getattr(config, "attention_types", None):  # GPT-Neo's: [[kinds, times], ...]
        order = [kind for group, times in kinds for kind in group * times]
        return {"attention_types": [[[order[i % len(order)]], 1] for i in range(layers)]}
    types = getattr(config, "layer_types", None)
    if not types or isinstance(getattr(type(config), config.attribute_map.get("layer_types", "layer_types"), None), property):
        return {}
    return {"layer_types": [types[i % len(types)] for i in range(layers)]}


def _key_value_heads(default: int | None, default_heads: int, settings: Settings) -> int:
    """Keep the family's grouping where it divides, else one per query head; the layout changes nothing, as a plan has many."""
    heads = max(1, settings.heads * (default or default_heads) // default_heads)
    return heads if settings.heads % heads == 0 else settings.heads


def _tokens(config: PretrainedConfig) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = {name: 0 for name in names if getattr(config, name, None) is not None}  # the zero byte is in no text
    start = {"decoder_start_token_id": 0} if config.is_encoder_decoder else {}
    return {"vocab_size": VOCABULARY, **special, **start}


def _dropouts(config: PretrainedConfig, settings: Settings) -> dict[str, Any]:
    changes = {}
    for name, value in config.to_dict().items():
        if ("drop" in name) and isinstance(value, float):
            changes[name] = 0.0 if "layer" in name and name.endswith("drop") else settings.dropout
    return changes


def _accepted_names(config: PretrainedConfig, names: Iterable[str]) -> list[str]:
    """The names the config's own constructor takes; a name that ``attribute_map`` maps to another is left to that one."""
    own = config.to_dict()
    mapped = config.attribute_map
    return list(dict.fromkeys(mapped.get(name, name) for name in names if mapped.get(name, name) in own))
