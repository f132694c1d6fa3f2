"""Calls of every kernel, and what they compute with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slapo_kernels import kernel_names, run
from slapo_testing.conformance.examples.kernel_calls import kernel_calls

Call = tuple[tuple[Any, ...], dict[str, Any]]


CALLS: dict[str, list[Call]] = {
    kernel: [(example.args, dict(example.kwargs)) for example in kernel_calls(kernel)] for kernel in kernel_names()
}
"""Kernel to arguments that it is called with, one of each kind."""
ROWS, WEIGHT = CALLS["rms_norm"][0][0]
LABELS = CALLS["linear_cross_entropy"][0][0][2]
IDS = CALLS["embedding"][0][0][0]


def names(calls: dict[str, list[Call]]) -> list[tuple[str, int]]:
    """Kernel and place of each call, for ids that tell."""
    return [(kernel, index) for kernel, those in calls.items() for index in range(len(those))]


def computed(
    kernel: str | Callable[..., Any],
    call: Call,
    choice: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """The outputs of a call, and the gradients of all its floating tensors, by a kernel's implementation or a function."""
    function = kernel if callable(kernel) else lambda *args, **kwargs: run(kernel, *args, choice=choice, **kwargs)
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.to(device)
        if value.isinf().any():  # a mask
            return value.to(device, dtype)
        leaves.append(value.to(device, dtype, copy=True).requires_grad_())
        return leaves[-1]

    args, kwargs = call
    torch.manual_seed(1)
    found = function(*map(leaf, args), **{name: leaf(value) for name, value in kwargs.items()})
    outputs = found if isinstance(found, tuple) else (found,)
    grads = [torch.linspace(-1, 1, each.numel(), device=device).view(each.shape).to(each.dtype) for each in outputs]
    torch.autograd.backward(outputs, grads)
    return [each.detach() for each in outputs] + [each.grad if each.grad is not None else torch.zeros(()) for each in leaves]
