"""Candidates for the inputs of a model without example inputs: the model's own, or tensors that fit its first layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core import forward_signature, get_logger

from ..nodes.opaque_modules import as_original

_LENGTH = 8
_TOKEN_SHAPED = dict.fromkeys(("attention_mask", "decoder_attention_mask"), 1) | dict.fromkeys(("token_type_ids", "labels"), 0)
"""Arguments with the shape of the tokens, and a value for each."""


def candidate_inputs(model: nn.Module, concrete: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield inputs by name that may fit the model: its ``dummy_inputs``, then tensors in the shapes that its layers take."""
    parameters = {name: each for name, each in forward_signature(model).parameters.items() if name not in concrete}
    own = _dummy_inputs(model)
    found = {name: value for name, value in own.items() if name in parameters} if isinstance(own, Mapping) else {}
    if concrete and isinstance(tokens := found.get("input_ids"), torch.Tensor):
        found = {name: torch.full_like(tokens, value) for name, value in _TOKEN_SHAPED.items() if name in parameters} | found
    if found:
        yield found
    named = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = [each.name for each in named if each.default is each.empty] or [each.name for each in named[:1]]
    device = next((tensor.device for tensor in model.parameters() if not tensor.is_meta), torch.device("cpu"))
    values = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in dict.fromkeys(_layer_input_shapes(model))]
    alike = [(value,) * len(names) for value in values]
    mixed = itertools.product(values[:4], repeat=len(names)) if len(names) < 4 else ()
    yield from (dict(zip(names, each, strict=True)) for each in [*alike, *mixed] if each)


def _dummy_inputs(model: nn.Module) -> Any:
    try:
        return getattr(as_original(model), "dummy_inputs", None)
    except Exception as err:  # a property of a stranger's, for another configuration
        get_logger().debug("dummy_inputs: %s", err)
        return None


def _layer_input_shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Yield shapes and dtypes of the layers' inputs, in module order, then those that fit parameters."""
    default = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    image = getattr(getattr(model, "config", None), "image_size", None)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield (2, _LENGTH), torch.long
        elif (channels := _size_attribute(module, ("in_channels", "num_features"))) is not None:
            dims = next((dims for dims in (1, 2, 3) if f"{dims}d" in type(module).__name__.lower()), 2)
            for size in [image] if type(image) is int else (32, 224):
                yield (2, channels, *(size,) * dims), default
            yield (2, channels), default
        elif (width := _size_attribute(module, ("in_features", "input_size", "embed_dim", "d_model", "nx"))) is not None:
            yield (2, width), default
            yield (2, _LENGTH, width), default
    for parameter in model.parameters():
        for width in (*parameter.shape[-1:], *parameter.shape[:1]):
            yield (2, width), default
            yield (2, _LENGTH, width), default


def _size_attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that is an integer, or None."""
    return next((value for name in names if type(value := getattr(module, name, None)) is int), None)
