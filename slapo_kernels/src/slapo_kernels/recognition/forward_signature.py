"""Signature of a forward whose arguments are all tensors."""

from __future__ import annotations

import inspect

from torch import nn


def tensor_inputs(module: nn.Module, method: str = "forward") -> tuple[str, ...] | None:
    """Return the names of a method's arguments if it has some, all positional and required; else None."""
    try:
        parameters = list(inspect.signature(getattr(type(module), method)).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):
        return None
    plain = all(each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty for each in parameters)
    return tuple(each.name for each in parameters) if parameters and plain else None
