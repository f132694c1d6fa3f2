"""Calls of every kernel, one of each kind that models make."""

from __future__ import annotations

from typing import Any

import torch

from .examples import KernelExample


def kernel_calls(kernel: str) -> list[KernelExample]:
    """Return calls of a kernel, which an implementation computes or refuses."""
    return [KernelExample(args, kwargs, refused=None) for args, kwargs in _CALLS.get(kernel, ())]


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


_LABELS = torch.tensor([[0, 3, -100, 9, 1], [2, -100, 4, 4, 5]])
_IDS = torch.tensor([[0, 3, 3, 9, 1], [2, 0, 4, 4, 5]])
_ROWS, _WEIGHT = _numbers(2, 5, 16), _numbers(16)
_WIDE, _EMPTY = _numbers(3, 1030), torch.zeros(0, 16)
"""Wider than a block of 1024 threads, and no rows at all."""
_GATES = [(x, x.flip(-1)) for x in (_ROWS, _ROWS[0, 0], _WIDE, _EMPTY)]
_ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "silu")

_CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
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
        ((_ROWS, _WEIGHT), {"eps": 1e-3}),
        ((_ROWS, _WEIGHT), {"eps": 1e-3, "offset": 1.0}),
        ((_ROWS[0], _WEIGHT), {"eps": 1e-3, "offset": 1.0, "cast": "weight"}),
        ((_WIDE, _numbers(1030)), {"eps": 1e-6}),
        ((_EMPTY, _WEIGHT), {"eps": 1e-3}),
    ],
    "layer_norm": [
        ((_ROWS, _WEIGHT, _WEIGHT.flip(0)), {"eps": 1e-3}),
        ((_ROWS, _WEIGHT, None), {"eps": 1e-3}),
        ((_ROWS, None, None), {"eps": 1e-3}),
        ((_WIDE, _numbers(1030), _numbers(1030).flip(0)), {"eps": 1e-6}),
        ((_EMPTY, _WEIGHT, _WEIGHT), {"eps": 1e-3}),
    ],
    "swiglu": [(gates, {}) for gates in _GATES],
    "geglu": [(gates, {"approximate": approximate}) for approximate in ("none", "tanh") for gates in _GATES],
    "bias_act": [
        *(((_ROWS, _WEIGHT), {"activation": each}) for each in _ACTIVATIONS),
        ((_ROWS, None), {"activation": "gelu"}),
        ((_WIDE, _numbers(1030)), {"activation": "silu"}),
        ((_EMPTY, _WEIGHT), {"activation": "gelu"}),
    ],
    "bias_dropout_residual": [
        ((_ROWS, _WEIGHT, _ROWS.flip(-1)), {"p": 0.5, "training": True}),
        ((_ROWS, None, _ROWS.flip(-1)), {"p": 0.5, "training": True}),
        ((_ROWS, _WEIGHT, _ROWS.flip(-1)), {"p": 0.5, "training": False}),
    ],
    "linear_cross_entropy": [
        ((_ROWS, _numbers(10, 16), _LABELS), {}),
        ((_ROWS, _numbers(10, 16), _LABELS), {"bias": _numbers(10), "reduction": "sum"}),
        ((_ROWS, _numbers(10, 16), _LABELS.clamp(min=0)), {"ignore_index": 4, "reduction": "none", "bias": _numbers(10)}),
    ],
    "embedding": [
        ((_IDS, _numbers(10, 16)), {}),
        ((_IDS, _numbers(10, 16)), {"padding_idx": 4}),
        ((_IDS, _numbers(10, 16)), {"padding_idx": -1}),
    ],
}
