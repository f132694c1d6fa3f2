"""A column-parallel layer in two nodes of autograd: its weight's gradient is computed while that of its input is summed.

    x -- wait ------------------ start --- layer        forward: no work but the layer's
           \\-- its weight -----------------/            backward: data of the layer, start, weight, wait

The layer's own forward hands the gradient of its output on to what stands for its weight, recorded before ``start``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from . import collectives, gathered
from .layers import is_conv1d, is_linear
from .linear_forwards import only_input

_GIVEN = "_slapo_given"
_COMPUTED = "computed"  # by a parametrisation or hook


class Source(Protocol):
    """Where the weight's gradient has the layer's input from, given what the forward kept of it."""

    def start(self, kept: torch.Tensor) -> None:
        """It will be needed soon."""

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        """The input; differentiable while a graph of the backward is made."""


def overlaps(module: nn.Module) -> bool:
    """Whether a layer's forward is one that can be split in two."""
    return (is_linear(module) or is_conv1d(module)) and "forward" not in module.__dict__


def overlap(module: nn.Module) -> None:
    """Let the layer's weights get their gradient while that of its input is summed."""
    module.__dict__["forward"] = types.MethodType(_forward, module)


def is_overlapping(forward: Callable[..., Any] | None) -> bool:
    """Whether a forward is the one ``overlap`` gives."""
    return getattr(forward, "__func__", None) is _forward


def stand_in(module: Any, x: torch.Tensor, kept: torch.Tensor, source: Source) -> torch.Tensor | None:
    """What stands for the weight, if it is a parameter that the forward will find as it is now, and wants a gradient."""
    weight, bias = _parameters(module)
    if not is_overlapping(module.__dict__.get("forward")) or weight is _COMPUTED or bias is _COMPUTED:
        return None
    if not (weight.requires_grad and x.is_floating_point() and weight.is_floating_point()):
        return None
    transposed = is_conv1d(module)
    shape = (*x.shape[:-1], module.nf if transposed else module.out_features)
    return collectives.apply(_Weights, kept, weight, bias, shape, transposed, source)


def give(module: nn.Module, x: torch.Tensor, standin: torch.Tensor | None) -> None:
    """What the layer's next forward is to use, if it is called with ``x`` and has the parameters it has now."""
    module.__dict__.pop(_GIVEN, None)
    if standin is not None:
        module.__dict__[_GIVEN] = x, dict(module._parameters), standin


def _forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = None if torch.compiler.is_compiling() else module.__dict__.pop(_GIVEN, None)
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and not torch.compiler.is_compiling():
        x = args[0]
        if given is not None:
            if given[0] is x and all(module._parameters.get(name) is known for name, known in given[1].items()):
                return _apart(module, x, given[2], None, None)
        elif (found := gathered.of(x)) is not None and _COMPUTED not in _parameters(module):
            return _of_gathered(module, x, found)
    elif len(args) != 1 or kwargs:
        only_input(module, args, kwargs)
    return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]


def _of_gathered(module: Any, x: torch.Tensor, found: gathered.Gathered) -> torch.Tensor:
    """The layer's output for a gathered input, of which this rank's part is kept."""
    standin: torch.Tensor | None = None

    def record() -> None:
        nonlocal standin
        standin = stand_in(module, x, found.part, found.again)

    entered = found.enter(x, record)
    entered = entered if entered.shape == x.shape else entered.view(x.shape)
    if standin is None:
        return type(module).forward(module, entered)  # type: ignore[no-any-return]
    found.again.expect(_dtype(x))
    return _apart(module, entered, standin, found.part, found.again)


def _apart(
    module: Any, x: torch.Tensor, standin: torch.Tensor, part: torch.Tensor | None, source: Source | None
) -> torch.Tensor:
    return collectives.apply(_Data, x, standin, module.weight, module.bias, is_conv1d(module), part, source)


def _parameters(module: nn.Module) -> tuple[Any, Any]:
    weight, bias = (module._parameters.get(name, _COMPUTED) for name in ("weight", "bias"))
    return weight, bias


class _Weights(torch.autograd.Function):
    """Stands for a layer's parameters: empty in the forward, their gradients in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        transposed: bool,
        source: Source,
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


class _Data(torch.autograd.Function):
    """A linear layer whose backward computes the input's gradient, and passes that of the output on to the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        standin: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        part: torch.Tensor | None,
        source: Source | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, part)
        ctx.transposed, ctx.dtype, ctx.source = transposed, x.dtype, source
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, part = ctx.saved_tensors
        if part is not None and ctx.needs_input_grad[1]:
            ctx.source.start(part)
        weight = weight.to(grad.dtype)
        product = grad @ (weight.t() if ctx.transposed else weight)
        return product.to(ctx.dtype), grad, None, None, None, None, None


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Of the output of a linear layer."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
