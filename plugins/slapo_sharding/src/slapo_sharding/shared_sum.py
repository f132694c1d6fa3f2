"""The sum of an input's gradient: once for all layers that are given the same tensor, and while one computes its weight's.

    x -- wait ------------------ start --- layer        forward: no work but the layer's
           \\-- its weight -----------------/            backward: data of the layer, start, weight, wait

The layer's own forward hands the gradient of its output on to what stands for its weight, recorded before ``start``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from . import collectives
from .layers import is_conv1d, is_linear

_GIVEN = "_slapo_given"
_COMPUTED = "computed"  # by a parametrisation or hook


class SharedSum:
    """Modules that use the same tensor sum its gradient over the group once, all their parts of it together.

    Which tensor that is shows when they run: one that another module has not been given has a sum of its own, so the
    gradients are right whatever the modules are given.

    Args:
        group: The ranks that each have a part of the gradient.
        members: Number of modules; once all have had the tensor, it is let go.
    """

    __slots__ = ("group", "known", "left", "members", "proven")  # what is kept in them is no state of the model

    def __init__(self, group: collectives.Group, members: int) -> None:
        self.group, self.members = group, members
        self.left = 0
        self.proven = False  # that all modules have been given one tensor, unchanged
        self.known: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def take(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``x`` for one of the modules, its gradient summed; the same tensor as long as ``x`` is the same and unchanged."""
        compiling = torch.compiler.is_compiling()
        if compiling and not self.proven:  # a graph has no versions to tell that x is unchanged
            return collectives.all_reduce_grad(x, self.group)
        version = 0 if compiling else x._version
        standins: list[torch.Tensor] = []
        if self.known is None or self.known[0] is not x or self.known[1] != version:
            self.known, self.left = (x, version, self._summed(module, x, standins)), self.members
        elif not compiling:
            self._record(module, x, standins)
        taken = self.known[2]
        self.left -= 1
        if self.left == 0:
            self.known, self.proven = None, True
        if standins:
            module.__dict__[_GIVEN] = taken, dict(module._parameters), standins[0]
        return taken

    def _summed(self, module: nn.Module, x: torch.Tensor, standins: list[torch.Tensor]) -> torch.Tensor:
        if torch.compiler.is_compiling():  # the compiler orders the backward itself
            return collectives.all_reduce_grad(x, self.group)
        return collectives.all_reduce_grad_around(x, self.group, lambda: self._record(module, x, standins))

    def _record(self, module: Any, x: torch.Tensor, standins: list[torch.Tensor]) -> None:
        """What stands for the weight, if it is a parameter that the forward will find as it is now."""
        module.__dict__.pop(_GIVEN, None)
        weight, bias = (module._parameters.get(name, _COMPUTED) for name in ("weight", "bias"))
        if not is_overlapping(module.__dict__.get("forward")) or weight is _COMPUTED or bias is _COMPUTED:
            return
        if weight.requires_grad and x.is_floating_point() and weight.is_floating_point():
            transposed = is_conv1d(module)
            width = module.nf if transposed else module.out_features
            standins.append(collectives.apply(_Weights, x, weight, bias, width, transposed, self.group))


def overlaps(module: nn.Module) -> bool:
    """Whether a layer's forward is one that can be split in two."""
    return (is_linear(module) or is_conv1d(module)) and "forward" not in module.__dict__


def overlap(module: nn.Module) -> None:
    """Let the layer's weights get their gradient while that of its input is summed."""
    module.__dict__["forward"] = types.MethodType(_forward, module)


def is_overlapping(forward: Callable[..., Any] | None) -> bool:
    """Whether a forward is the one ``overlap`` gives."""
    return getattr(forward, "__func__", None) is _forward


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    given = None if torch.compiler.is_compiling() else module.__dict__.pop(_GIVEN, None)
    if given is None or given[0] is not x or not all(module._parameters.get(name) is known for name, known in given[1].items()):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return collectives.apply(_Data, x, given[2], module.weight, module.bias, is_conv1d(module))


class _Weights(torch.autograd.Function):
    """Stands for a layer's parameters: empty in the forward, their gradients in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        width: int,
        transposed: bool,
        group: collectives.Group,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.transposed, ctx.group = transposed, group
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return x.new_empty((), dtype=_dtype(x)).expand(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (weight, bias) = ctx.saved_tensors, ctx.dtypes
        if torch.is_grad_enabled():  # a gradient of this gradient is this rank's part of x's
            x = collectives.all_reduce_grad(x, ctx.group)
        count = x.shape[:-1].numel()  # a rank may have no columns
        rows, inputs = grad.reshape(count, grad.shape[-1]), x.to(grad.dtype).reshape(count, x.shape[-1])
        product = inputs.t() @ rows if ctx.transposed else rows.t() @ inputs
        return None, product.to(weight), rows.sum(0).to(bias) if ctx.needs_input_grad[2] else None, None, None, None


class _Data(torch.autograd.Function):
    """A linear layer whose backward computes the input's gradient, and passes that of the output on to the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, standin: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.transposed, ctx.dtype = transposed, x.dtype
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.saved_tensors[0].to(grad.dtype)
        product = grad @ (weight.t() if ctx.transposed else weight)
        return product.to(ctx.dtype), grad, None, None, None


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Of the output of a linear layer."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
