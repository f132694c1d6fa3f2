"""Parameters of which ranks hold copies: each copy sees a part of the gradient and gets the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core.parameters import ShardSpec

from . import collectives


class CopySum:
    """A hook of a parameter: each micro-batch's gradient is summed over all that hold the same, on this rank as well.

    Args:
        spec: How the parameter is sharded.
    """

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec

    def __deepcopy__(self, memo: dict[int, Any]) -> CopySum:
        return self

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        dim, ranges = self.spec.dim, self.spec.ranges()
        parts = grad.split_with_sizes([stop - start for start, stop in ranges], dim)
        whole = grad.new_zeros(self.spec.full_shape)
        for (start, stop), part in zip(ranges, parts, strict=True):
            whole.narrow(dim, start, stop - start).add_(part)
        return self.spec.local(collectives.all_reduce(whole, self.spec.group))


def sum_copies(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Let every copy that the parameter holds get the whole gradient, also when it is unfrozen only later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks of no other
    parameter.register_hook(CopySum(spec))  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)


def has_copies(spec: ShardSpec) -> bool:
    """Whether something of the parameter is held more than once."""
    return sum(spec.sizes) > spec.full_shape[spec.dim]
