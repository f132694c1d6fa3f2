"""A model in a folder of Hugging Face's format: ``config.json``, and weights in safetensors files if there are any."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig  # noqa: TID253
from transformers.utils import logging  # noqa: TID253

from ..run_data.settings import VOCABULARY, Settings, SettingsError, is_folder


def folder_config(folder: str) -> PretrainedConfig:
    """Return the config of a folder.

    Raises:
        SettingsError: there is none, it cannot be read, or its vocabulary is too small for bytes.
    """
    if not (Path(folder) / "config.json").is_file():
        raise SettingsError(
            f"--model {folder}: no config.json there; give a folder that `save_pretrained` wrote, or a model type"
        )
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except Exception as err:
        reason = str(err).strip().partition("\n")[0].rstrip(".")
        raise SettingsError(f"--model {folder}: transformers cannot read its config.json: {reason}; mend it") from err
    size = getattr(config, "vocab_size", None) or 0
    if size < VOCABULARY:
        raise SettingsError(
            f"--model {folder}: its vocabulary has {size} entries, and tokens are bytes; use a model with {VOCABULARY} or more"
        )
    return config


def folder_sizes(folder: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return ``layers``, ``hidden`` and ``heads`` of the model in a folder.

    Args:
        folder: The folder.
        given: Flags that the user gave; sizes among them must be the folder's.

    Raises:
        SettingsError: the config cannot be read or lacks a size, or a flag contradicts it.
    """
    config = folder_config(folder)
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    found: dict[str, int] = {}
    for flag, name in names.items():
        value = getattr(config, name, None)
        if not isinstance(value, int):
            raise SettingsError(f"--model {folder}: its config has no {name}; use a language model")
        if given.get(flag, value) != value:
            raise SettingsError(f"--{flag} {given[flag]}: the model in {folder} has {value}; leave the flag out")
        found[flag] = value
    return found


def folder_weights(settings: Settings) -> str | None:
    """Return the folder of the weights that training starts from; None if there are none, so that they are random."""
    if is_folder(settings.model) and any(Path(settings.model).glob("*.safetensors")):
        return settings.model
    return None


def check_positions(config: PretrainedConfig, settings: Settings) -> None:
    """Raise ``SettingsError`` for a sequence longer than the model's table of positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < settings.seq:
        raise SettingsError(
            f"--seq {settings.seq}: the model in {settings.model} has {longest} positions; use at most {longest}"
        )
