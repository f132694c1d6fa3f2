"""A batch as the arguments of a model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_core import named_inputs, split_inputs


def named_batch(root: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return the arguments of a batch, or of example inputs, by name; see ``slapo_core.modules.forward_arguments``."""
    return named_inputs(root, *split_inputs(inputs))


def unshared_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with one tensor object per argument: a graph cannot tell two uses of one object apart."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return {name: tree_map_only(torch.Tensor, own, value) for name, value in inputs.items()}
