"""Published sizes of models, as data, and models of these sizes without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from slapo_core import UnknownNameError


@dataclass(frozen=True)
class PublishedSize:
    """A model as it is published.

    Args:
        name: E.g. ``"llama-3-70b"``.
        model_type: Transformers' name of the family.
        head: The ``Auto`` class of Transformers that makes it.
        parameters: Number of parameters, tied ones counted once.
        rounded: True if the published number is rounded, to half a percent at most.
        source: Page of the published ``config.json``.
        config: Arguments of the family's config class.
    """

    name: str
    model_type: str
    head: str
    parameters: int
    rounded: bool
    source: str
    config: dict[str, Any]


@cache
def published_sizes() -> dict[str, PublishedSize]:
    """Return the known sizes by name."""
    data = json.loads(files(__package__).joinpath("published_sizes.json").read_text(encoding="utf-8"))
    return {name: PublishedSize(name, **entry) for name, entry in data.items()}


def published_model(name: str, **overrides: Any) -> nn.Module:
    """Return a model of a published size with parameters and buffers on the meta device.

    Args:
        name: A key of ``published_sizes``, e.g. ``"llama-3-70b"``.
        **overrides: Other values of the config, e.g. ``num_hidden_layers=2``.

    Raises:
        UnknownNameError: no such size.
    """
    import transformers

    sizes = published_sizes()
    if name not in sizes:
        raise UnknownNameError.of("published size", name, sizes)
    size = sizes[name]
    config = transformers.AutoConfig.for_model(size.model_type, **{**size.config, **overrides})
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, size.head).from_config(config)
    return model
