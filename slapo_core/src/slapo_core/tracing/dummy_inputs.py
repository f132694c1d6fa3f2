"""Inputs that a model itself has for being traced, as those of Transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..inputs import signature_of

_LIKE_TOKENS = {
    "attention_mask": torch.ones_like,
    "decoder_attention_mask": torch.ones_like,
    "token_type_ids": torch.zeros_like,
    "labels": torch.clone,
}
"""Arguments that have the shape of the tokens."""


def dummy_inputs(module: nn.Module, concrete_args: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the module's ``dummy_inputs`` by argument; None where it has none.

    Args:
        module: What is to be traced.
        concrete_args: Arguments that are no inputs. Where any are given, the others are inputs, as far as they are known here.
    """
    found = getattr(module, "dummy_inputs", None)
    if not isinstance(found, Mapping):
        return None
    names = signature_of(module).parameters.keys() - (concrete_args or {}).keys()
    given = {name: value for name, value in found.items() if name in names}
    tokens = next(
        (value for value in given.values() if isinstance(value, torch.Tensor) and not value.is_floating_point()), None
    )
    if concrete_args and tokens is not None:
        given.update({name: make(tokens) for name, make in _LIKE_TOKENS.items() if name in names - given.keys()})
    return given or None
