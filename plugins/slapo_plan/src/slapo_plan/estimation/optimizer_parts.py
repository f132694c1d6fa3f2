"""Test of whether an optimizer updates parts of a tensor as it updates the whole one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..measurement.stage_run import OptimizerFactory

WHOLE_TENSORS = (
    "the optimizer updates whole tensors, e.g. by their norms, and ranks hold parts of them; what each rank gathers and keeps "
    "for its step is not counted"
)
"""Note of an estimate on ranks that hold parts of tensors."""


def updates_parts(optimizer: OptimizerFactory) -> bool:
    """Return True if two halves of a small matrix are updated as the whole matrix is; True also if it cannot be tried."""
    numbers = torch.Generator().manual_seed(0)
    values, gradients = (torch.randn(8, 8, generator=numbers) for _ in range(2))
    try:
        whole = _stepped(optimizer, [values], [gradients])
        return torch.allclose(whole, _stepped(optimizer, values.chunk(2), gradients.chunk(2)))
    except Exception:  # optimizers may raise anything; the estimate itself steps it on the model's parameters
        return True


def _stepped(optimizer: OptimizerFactory, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    parameters = [nn.Parameter(each.clone()) for each in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer(parameters).step()
    return torch.cat([each.detach() for each in parameters])
