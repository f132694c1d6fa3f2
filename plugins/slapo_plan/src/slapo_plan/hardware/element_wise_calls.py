"""Calls of the element-wise operators that a calibration measures one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_SIMPLE = "tanh gelu silu sigmoid exp sqrt rsqrt erf relu neg cos reciprocal"
_GRADIENTS = "tanh_backward gelu_backward silu_backward sigmoid_backward"


def element_wise_calls(random: Callable[..., torch.Tensor]) -> Iterator[Callable[..., Any]]:
    """Iterate over calls ``call(x, y, state)`` on tensors ``[512, 512]``; ``state`` may be changed in place.

    Args:
        random: Returns a tensor of a shape with numbers in [0, 1).
    """
    aten, positive = torch.ops.aten, random(512, 512) + 1
    for name in _SIMPLE.split():
        yield _on(getattr(aten, name).default, "x")
    for name in _GRADIENTS.split():
        yield _on(getattr(aten, name).default, "xy")
    yield lambda x, y, state: aten.threshold_backward.default(x, y, 0)
    for name in ("mul", "sub", "div"):
        yield _on(getattr(aten, name).Tensor, "xy")
    yield lambda x, y, state: aten.mul_.Tensor(state, 1.0)
    yield lambda x, y, state: aten.div_.Tensor(state, 1.0)
    yield lambda x, y, state: aten.pow.Tensor_Scalar(x, 3.0)
    yield lambda x, y, state: aten.lerp_.Scalar(state, y, 0.1)
    yield lambda x, y, state: aten.addcmul_.default(state, x, y, value=0.1)
    yield lambda x, y, state: aten.addcdiv_.default(state, x, positive, value=-0.1)
    yield from _reductions(random)
    yield from _copies(random)


def _on(run: Callable[..., Any], names: str) -> Callable[..., Any]:
    """Return the call of an operator on ``x``, or on ``x`` and ``y``."""
    return lambda x, y, state: run(*(x, y)[: len(names)])


def _reductions(random: Callable[..., torch.Tensor]) -> Iterator[Callable[..., Any]]:
    aten = torch.ops.aten
    rows = torch.arange(512, device=random(1).device)
    one, weight, mean, spread = random(1).squeeze(0), random(512), random(512, 1), random(512, 1) + 0.5
    yield lambda x, y, state: aten._softmax.default(x, -1, False)
    yield lambda x, y, state: aten._safe_softmax.default(x, -1)
    yield lambda x, y, state: aten._softmax_backward_data.default(x, y, -1, torch.float32)
    yield lambda x, y, state: aten._log_softmax.default(x, -1, False)
    yield lambda x, y, state: aten._log_softmax_backward_data.default(x, y, -1, torch.float32)
    yield lambda x, y, state: aten.nll_loss_forward.default(x, rows, None, 1, -100)
    yield lambda x, y, state: aten.nll_loss_backward.default(one, x, rows, None, 1, -100, one)
    yield lambda x, y, state: aten.native_layer_norm.default(x, [512], weight, weight, 1e-5)
    yield lambda x, y, state: aten.native_layer_norm_backward.default(
        x, y, [512], mean, spread, weight, weight, [True, True, True]
    )
    yield lambda x, y, state: aten.embedding.default(x, rows)
    yield lambda x, y, state: aten.embedding_dense_backward.default(x, rows, 512, -1, False)
    yield lambda x, y, state: aten.sum.dim_IntList(x, [0], True)
    yield lambda x, y, state: aten.mean.dim(x, [-1], True)


def _copies(random: Callable[..., torch.Tensor]) -> Iterator[Callable[..., Any]]:
    aten = torch.ops.aten
    mask = random(512, 512) > 0.5
    yield lambda x, y, state: aten.clone.default(x.view(64, 8, 512).transpose(0, 1), memory_format=torch.contiguous_format)
    yield lambda x, y, state: aten.cat.default([x, y], 1)
    yield lambda x, y, state: aten.copy_.default(state, x)
    yield lambda x, y, state: aten._to_copy.default(x, dtype=torch.bfloat16)
    yield lambda x, y, state: aten.where.self(mask, x, y)
    yield lambda x, y, state: aten.masked_fill.Scalar(x, mask, 0.0)
    yield lambda x, y, state: aten.bernoulli_.float(state, 0.9)
    yield lambda x, y, state: aten.zeros.default([512, 512], device=x.device)
    yield lambda x, y, state: aten.constant_pad_nd.default(x, [0, 1])
