"""Linear layers of stage 3 of ZeRO, whose graph holds weights that can be freed between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional


@contextmanager
def replaced_linear() -> Iterator[None]:
    """Replace ``torch.nn.functional.linear`` inside, as DeepSpeed does for stage 3."""
    original = functional.linear
    functional.linear = _linear
    try:
        yield
    finally:
        functional.linear = original


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    """Autograd node of a linear layer that saves the weight itself instead of a view of it."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is None:
            return x.matmul(weight.t())
        if x.dim() == 2:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        output += bias
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; all of them exist at once."""
        x, weight, bias = ctx.saved_tensors
        of_input = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias
