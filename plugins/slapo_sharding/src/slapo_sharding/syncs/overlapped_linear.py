"""Column-parallel layer in two autograd nodes: the gradient of its weight is computed while that of its input is reduced."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_tracing.nodes import is_taken_apart

from ..communication import collectives
from ..rules.layers import is_conv1d, is_linear, only_input
from . import overlapped_reduction


def overlaps(module: nn.Module) -> bool:
    """Return whether a layer's forward can be two nodes; a layer whose operations were traced keeps its own."""
    is_layer = is_linear(module) or is_conv1d(module)
    return is_layer and "forward" not in module.__dict__ and not is_taken_apart(module)


def overlap(module: nn.Module) -> None:
    """Compute the gradient of the layer's weight while that of its input is reduced."""
    module.__dict__["forward"] = types.MethodType(_forward, module)


def is_overlapping(forward: Callable[..., Any] | None) -> bool:
    """Return whether a forward is the one that ``overlap`` installs."""
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
    """Return whether the weight needs a gradient and is a parameter of the layer; a parametrized weight is not."""
    weight = module._parameters.get("weight")
    if weight is None or "bias" not in module._parameters:
        return False
    return weight.requires_grad and x.is_floating_point() and weight.is_floating_point()


def _overlapped_forward(module: Any, x: torch.Tensor, found: overlapped_reduction.OverlappedReduction) -> torch.Tensor:
    weight, bias, transposed = module.weight, module.bias, is_conv1d(module)
    shape = (*x.shape[:-1], weight.shape[1 if transposed else 0])
    found.source.add_dtype(_compute_dtype(x))
    weights = collectives.apply_function(_WeightGradient, found.saved, weight, bias, shape, transposed, found.source)
    found.run_before(weights)
    return collectives.apply_function(_InputGradient, x, weights, weight, bias, transposed, found.saved, found.source)


class _WeightGradient(torch.autograd.Function):
    """Autograd node for a layer's parameters: the forward returns no data, the backward computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        saved: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        transposed: bool,
        source: overlapped_reduction.InputSource,
    ) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.transposed, ctx.source = transposed, source
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return saved.new_empty((), dtype=_compute_dtype(saved)).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (saved,), (weight, bias) = ctx.saved_tensors, ctx.dtypes
        x = ctx.source.input(saved)
        count = x.shape[:-1].numel()  # reshape(-1) fails for a rank without columns
        rows, inputs = grad.reshape(count, grad.shape[-1]), x.to(grad.dtype).reshape(count, x.shape[-1])
        product = inputs.t() @ rows if ctx.transposed else rows.t() @ inputs
        return None, product.to(weight), rows.sum(0).to(bias) if ctx.needs_input_grad[2] else None, None, None, None


class _InputGradient(torch.autograd.Function):
    """Autograd node of a linear layer: the backward computes the input's gradient and passes the output's to the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        saved: torch.Tensor,
        source: overlapped_reduction.InputSource,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, saved)
        ctx.transposed, ctx.dtype, ctx.source = transposed, x.dtype, source
        rows = F.linear(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight.t() if transposed else weight, bias)
        # a plain view could not be changed in place by the next operation
        output: torch.Tensor = torch.ops.aten._unsafe_view(rows, weights.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, saved = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.source.start_gather(saved)
        product = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(grad.dtype)
            product = (grad @ (weight.t() if ctx.transposed else weight)).to(ctx.dtype)
        return product, grad, None, None, None, None, None


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's output; autocast leaves double precision alone."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype
