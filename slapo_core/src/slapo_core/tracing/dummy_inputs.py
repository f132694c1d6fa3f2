"""Inputs that a model itself has for being traced, as those of Transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..inputs import signature_of

_LIKE_TOKENS = dict.fromkeys(("attention_mask", "decoder_attention_mask"), 1) | dict.fromkeys(("token_type_ids", "labels"), 0)
"""Arguments that have the shape of the tokens, and a value for them."""


def dummy_inputs(module: nn.Module, concrete_args: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the module's ``dummy_inputs`` by argument; None where it has none.

    Args:
        module: What is to be traced.
        concrete_args: Arguments that are no inputs. Where any are given, the others are inputs, as far as they are known here.
    """
    found: Mapping[str, Any] = getattr(module, "dummy_inputs", None) or {}
    names = signature_of(module).parameters.keys() - (concrete_args or {}).keys()
    given = {name: value for name, value in found.items() if name in names}
    if concrete_args and isinstance(tokens := given.get("input_ids"), torch.Tensor):
        given = {name: torch.full_like(tokens, value) for name, value in _LIKE_TOKENS.items() if name in names} | given
    return given or None
