"""A batch as the arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def by_name(root: nn.Module, inputs: Any) -> dict[str, Any]:
    """The arguments of a batch by name: a mapping has them, a tuple or a single value is bound to the forward's signature."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return dict(inspect.signature(root.forward).bind(*given).arguments)


def apart(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with a tensor of its own for each argument: one given twice could not be told apart in a graph."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return {name: tree_map_only(torch.Tensor, own, value) for name, value in inputs.items()}
