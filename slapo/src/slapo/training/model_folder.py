"""A model in a folder of Hugging Face's format: ``config.json``, and weights in safetensors files if there are any."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers  # noqa: TID253
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig  # noqa: TID253
from transformers.models.auto.modeling_auto import (  # noqa: TID253
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging  # noqa: TID253

from ..run_data.settings import VOCABULARY, Settings, SettingsError, is_folder

KNOWN = {**MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Model type to the class with a language-model head."""

EXAMPLES = ("gpt2", "llama", "qwen3")
"""Types to suggest if the given one resembles no known type."""


def folder_config(folder: str) -> PretrainedConfig:
    """Return the config of a folder.

    Raises:
        SettingsError: there is none, it cannot be read, it is of no language model, or its vocabulary is too small for bytes.
    """
    if not (Path(folder) / "config.json").is_file():
        raise SettingsError(
            f"--model {folder}: no config.json there; give a folder that `save_pretrained` wrote, or a model type"
        )
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # asks nobody
    except Exception as err:
        raise SettingsError(_unreadable_config(folder, err)) from err
    if config.model_type not in KNOWN:
        raise SettingsError(f"--model {folder}: {unknown_type(config.model_type)}")
    size = getattr(config.get_text_config(), "vocab_size", None) or 0
    if size < VOCABULARY:
        raise SettingsError(
            f"--model {folder}: its vocabulary has {size} entries, and tokens are bytes; use a model with {VOCABULARY} or more"
        )
    return config


def unknown_type(model_type: str) -> str:
    """Return the clause on a model type that is no language model, with what works instead."""
    version = transformers.__version__
    if model_type in CONFIG_MAPPING:
        others = "plan and tune other models in Python, by slapo.plan and slapo.tune"
        return f"transformers {version} has no language model of type {model_type!r}; {others}"
    near = get_close_matches(model_type, KNOWN, n=3) or EXAMPLES
    listed = f"{', '.join(near)} or another of its {len(KNOWN)}"
    return f"transformers {version} has no language model of type {model_type!r}; try {listed}"


def error_clause(err: Exception) -> str:
    """Return an error's message as a clause, without headings of validators and names of error classes."""
    said = [line.strip() for line in str(err).splitlines() if line.strip() and not line.rstrip().endswith(":")]
    text = re.sub(r"^\w+(Error|Exception): ", "", said[0]) if said else type(err).__name__
    return re.sub(r"\.\s+(?=[A-Z])", "; ", text).rstrip(".")


def _unreadable_config(folder: str, err: Exception) -> str:
    if "trust_remote_code" in str(err):
        what = "its config.json names code of its own, which is not run"
        return f"--model {folder}: {what}; plan and tune such a model in Python, by slapo.plan and slapo.tune"
    return f"--model {folder}: transformers cannot read its config.json: {error_clause(err)}; mend it"


def folder_sizes(folder: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return ``layers``, ``hidden`` and ``heads`` of the model in a folder.

    Args:
        folder: The folder.
        given: Flags that the user gave; sizes among them must be the folder's.

    Raises:
        SettingsError: the config cannot be read or lacks a size, or a flag contradicts it.
    """
    config = folder_config(folder).get_text_config()
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    found: dict[str, int] = {}
    for flag, name in names.items():
        value = getattr(config, name, None)
        if flag == "heads" and value is None:  # a model without attention
            value = 1
        if not isinstance(value, int):
            raise SettingsError(f"--model {folder}: its config has no {name}; use a language model")
        if given.get(flag, value) != value:
            raise SettingsError(f"--{flag} {given[flag]}: the model in {folder} has {value}; leave the flag out")
        found[flag] = value
    return found


def folder_weights(settings: Settings) -> str | None:
    """Return the folder of the weights that training starts from; None if there are none, so that they are random.

    Raises:
        SettingsError: the weights are quantized.
    """
    if not is_folder(settings.model) or not any(Path(settings.model).glob("*.safetensors")):
        return None
    if quantization := getattr(folder_config(settings.model), "quantization_config", None):
        method = dict(quantization).get("quant_method", "a method of its own")
        raise SettingsError(
            f"--model {settings.model}: its weights are quantized by {method}, and these cannot be trained; save the model "
            "without quantization, or leave the weights out"
        )
    return settings.model


def most_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions of a model's table; None if it has no such limit."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def check_positions(config: PretrainedConfig, settings: Settings) -> None:
    """Raise ``SettingsError`` for a sequence longer than the model's table of positions."""
    longest = most_positions(config)
    if longest is not None and longest < settings.seq:
        raise SettingsError(
            f"--seq {settings.seq}: the model in {settings.model} has {longest} positions; use at most {longest}"
        )
