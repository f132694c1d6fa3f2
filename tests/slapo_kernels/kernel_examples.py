"""Calls of every kernel, and what they compute with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slapo_kernels.dispatch.dispatcher import run

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _heads(queries: int = 5, keys: int = 5, grouped: bool = False) -> tuple[torch.Tensor, ...]:
    k, v = (_numbers(2, 2 if grouped else 4, keys, 16) for _ in range(2))
    return _numbers(2, 4, queries, 16), k + 0.1, v.flip(-1)


def _mask(kind: str) -> torch.Tensor:
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[1, :, :, 4] = False
    if kind == "empty row":
        seen[1, :, 0] = False
    return torch.zeros(2, 1, 5, 5).masked_fill(~seen, -torch.inf) if kind == "added" else seen


LABELS = torch.tensor([[0, 3, -100, 9, 1], [2, -100, 4, 4, 5]])
IDS = torch.tensor([[0, 3, 3, 9, 1], [2, 0, 4, 4, 5]])
ROWS, WEIGHT = _numbers(2, 5, 16), _numbers(16)

CALLS: dict[str, list[Call]] = {
    "attention": [
        (_heads(), {}),
        (_heads(keys=7), {"scale": 0.3}),
        (_heads(grouped=True), {"is_causal": True}),
        (_heads(queries=3), {"is_causal": True}),
        *(((*_heads(grouped=True), _mask(kind)), {}) for kind in ("seen", "added", "empty row")),
    ],
    "rotary": [
        ((_numbers(2, 4, 5, 16), _numbers(2, 1, 5, 16), _numbers(2, 5, 16).cos(), _numbers(2, 5, 16).sin()), {}),
        (
            (_numbers(2, 5, 4, 16), _numbers(2, 5, 2, 16), _numbers(1, 5, 16).cos(), _numbers(1, 5, 16).sin()),
            {"unsqueeze_dim": 2},
        ),
    ],
    "rms_norm": [
        ((ROWS, WEIGHT), {"eps": 1e-3}),
        ((ROWS, WEIGHT), {"eps": 1e-3, "offset": 1.0}),
        ((ROWS[0], WEIGHT), {"eps": 1e-3, "offset": 1.0, "cast": "weight"}),
    ],
    "layer_norm": [
        ((ROWS, WEIGHT, WEIGHT.flip(0)), {"eps": 1e-3}),
        ((ROWS, WEIGHT, None), {"eps": 1e-3}),
        ((ROWS, None, None), {"eps": 1e-3}),
    ],
    "swiglu": [((ROWS, ROWS.flip(-1)), {})],
    "geglu": [((ROWS, ROWS.flip(-1)), {"approximate": approximate}) for approximate in ("none", "tanh")],
    "bias_act": [
        *(
            ((ROWS, WEIGHT), {"activation": each})
            for each in ("gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "silu")
        ),
        ((ROWS, None), {"activation": "gelu"}),
    ],
    "bias_dropout_residual": [
        ((ROWS, WEIGHT, ROWS.flip(-1)), {"p": 0.5, "training": True}),
        ((ROWS, None, ROWS.flip(-1)), {"p": 0.5, "training": True}),
        ((ROWS, WEIGHT, ROWS.flip(-1)), {"p": 0.5, "training": False}),
    ],
    "linear_cross_entropy": [
        ((ROWS, _numbers(10, 16), LABELS), {}),
        ((ROWS, _numbers(10, 16), LABELS), {"bias": _numbers(10), "reduction": "sum"}),
        ((ROWS, _numbers(10, 16), LABELS.clamp(min=0)), {"ignore_index": 4, "reduction": "none", "bias": _numbers(10)}),
    ],
    "embedding": [
        ((IDS, _numbers(10, 16)), {}),
        ((IDS, _numbers(10, 16)), {"padding_idx": 4}),
        ((IDS, _numbers(10, 16)), {"padding_idx": -1}),
    ],
}
"""Kernel to arguments that it is called with, one of each kind."""


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
