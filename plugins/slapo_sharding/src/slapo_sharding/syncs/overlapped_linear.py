"""A column-parallel layer in two nodes of autograd: its weight's gradient is computed while that of its input is summed.

The layer's own node hands the gradient of its output on to one that stands for its weight; see ``started`` for their order.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_tracing.nodes import is_taken_apart

from ..communication import collectives
from ..rules.layers import is_conv1d, is_linear
from ..rules.linear_subclasses import only_input
from . import overlapped_reduction


def overlaps(module: nn.Module) -> bool:
    """Return whether a layer's forward can be split in two; one whose operations are traced is to stay as it is."""
    is_layer = is_linear(module) or is_conv1d(module)
    return is_layer and "forward" not in module.__dict__ and not is_taken_apart(module)


def overlap(module: nn.Module) -> None:
    """Let the layer's weights get their gradient while that of its input is summed."""
    module.__dict__["forward"] = types.MethodType(_forward, module)


def is_overlapping(forward: Callable[..., Any] | None) -> bool:
    """Return whether a forward is the one ``overlap`` gives."""
    return getattr(forward, "__func__", None) is _forward


def _forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if len(args) != 1 or kwargs:
        only_input(module, args, kwargs)
    elif not torch.compiler.is_compiling() and isinstance(args[0], torch.Tensor):
        found = overlapped_reduction.reduction_of(args[0])
        if found is not None and _wants_gradient(module, args[0]):
            return _overlapped_forward(module, args[0], found)
    return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]


_forward.computes_as_class = True  # type: ignore[attr-defined]  # see ``slapo_fusion.decompose``, which leaves it out


def _wants_gradient(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether the weight needs a gradient and is a parameter of the layer, which a parametrised one is not."""
    weight = module._parameters.get("weight")
    if weight is None or "bias" not in module._parameters:
        return False
    return weight.requires_grad and x.is_floating_point() and weight.is_floating_point()


def _overlapped_forward(module: Any, x: torch.Tensor, found: overlapped_reduction.OverlappedReduction) -> torch.Tensor:
    weight, bias, transposed = module.weight, module.bias, is_conv1d(module)
    shape = (*x.shape[:-1], weight.shape[1 if transposed else 0])
    found.source.expect(_dtype(x))
    weights = collectives.apply_function(_WeightGradient, found.kept, weight, bias, shape, transposed, found.source)
    found.precede(weights)
    return collectives.apply_function(_InputGradient, x, weights, weight, bias, transposed, found.kept, found.source)


class _WeightGradient(torch.autograd.Function):
    """Stands for a layer's parameters: empty in the forward, their gradients in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        transposed: bool,
        source: overlapped_reduction.InputSource,
    ) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.transposed, ctx.source = transposed, source
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return kept.new_empty((), dtype=_dtype(kept)).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (kept,), (weight, bias) = ctx.saved_tensors, ctx.dtypes
        x = ctx.source.whole(kept)
        count = x.shape[:-1].numel()  # a rank may have no columns
        rows, inputs = grad.reshape(count, grad.shape[-1]), x.to(grad.dtype).reshape(count, x.shape[-1])
        product = inputs.t() @ rows if ctx.transposed else rows.t() @ inputs
        return None, product.to(weight), rows.sum(0).to(bias) if ctx.needs_input_grad[2] else None, None, None, None


class _InputGradient(torch.autograd.Function):
    """A linear layer whose backward computes the input's gradient, and passes that of the output on to the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        kept: torch.Tensor,
        source: overlapped_reduction.InputSource,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, kept)
        ctx.transposed, ctx.dtype, ctx.source = transposed, x.dtype, source
        rows = F.linear(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight.t() if transposed else weight, bias)
        output: torch.Tensor = torch.ops.aten._unsafe_view(rows, weights.shape)  # what follows may change it in place
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, kept = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.source.start(kept)
        product = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(grad.dtype)
            product = (grad @ (weight.t() if ctx.transposed else weight)).to(ctx.dtype)
        return product, grad, None, None, None, None, None


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's output; autocast leaves double precision alone."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype
