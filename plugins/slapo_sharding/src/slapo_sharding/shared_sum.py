"""The sum of an input's gradient: once for all layers that are given the same tensor, and while they compute their weights'.

    x -- wait --------------------------- start --- q, k, v        forward: no work but the layers'
           \\-- weights of q, k and v ---------------/              backward: data of v, k, q; start; weights; wait

The layers' own forward hands the gradient of their output on to what stands for their weights, recorded before ``start``.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core.wrapping import own_forward

from . import collectives
from .layers import is_conv1d, is_linear

_GIVEN = "_slapo_given"


class SharedSum:
    """Modules that use the same tensor sum its gradient over the group once, all their parts of it together.

    Which tensor that is shows when they run: one that another module has not been given has a sum of its own, so the
    gradients are right whatever the modules are given.

    Args:
        group: The ranks that each have a part of the gradient.
        modules: Who is given the tensor; once all have had it, it is let go.
    """

    def __init__(self, group: collectives.Group, modules: Sequence[nn.Module]) -> None:
        self.group, self.modules = group, list(modules)
        self.left = 0
        self.proven = False  # that all modules have been given one tensor, unchanged
        self.known: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self.weights: dict[nn.Module, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSum:
        memo[id(self)] = copied = SharedSum(self.group, ())
        copied.modules = copy.deepcopy(self.modules, memo)
        return copied

    def take(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``x`` for one of the modules, its gradient summed; the same tensor as long as ``x`` is the same and unchanged."""
        if torch.compiler.is_compiling() and not self.proven:  # a graph has no versions to tell that x is unchanged
            return collectives.all_reduce_grad(x, self.group)
        version = 0 if torch.compiler.is_compiling() else x._version
        if self.known is None or self.known[0] is not x or self.known[1] != version:
            self.known, self.left = (x, version, self._summed(x)), len(self.modules)
        taken = self.known[2]
        self.left -= 1
        if self.left == 0:
            self.known, self.proven = None, True
        self._hand_over(module, taken)
        return taken

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # the compiler orders the backward itself
            return collectives.all_reduce_grad(x, self.group)
        self.weights.clear()
        return collectives.all_reduce_grad_around(x, self.group, lambda: self._record_weights(x))

    def _hand_over(self, module: nn.Module, taken: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        module.__dict__.pop(_GIVEN, None)
        if (weight := self.weights.pop(module, None)) is not None:
            module.__dict__[_GIVEN] = taken, weight

    def _record_weights(self, x: torch.Tensor) -> None:
        for module in self.modules:
            if is_overlapping(own_forward(module)) and module.weight.requires_grad:
                transposed = is_conv1d(module)
                width = module.nf if transposed else module.out_features
                self.weights[module] = _apply(_Weights, x, module.weight, module.bias, width, transposed)


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
    if given is None or given[0] is not x:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _apply(_Data, x, given[1], module.weight, module.bias, is_conv1d(module))


class _Weights(torch.autograd.Function):
    """Stands for a layer's parameters: empty in the forward, their gradients in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width: int, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.transposed = transposed
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return x.new_empty((), dtype=_dtype(x)).expand(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (weight, bias) = ctx.saved_tensors, ctx.dtypes
        count = x.shape[:-1].numel()  # a rank may have no columns
        rows, inputs = grad.reshape(count, grad.shape[-1]), x.to(grad.dtype).reshape(count, x.shape[-1])
        product = inputs.t() @ rows if ctx.transposed else rows.t() @ inputs
        return None, product.to(weight), rows.sum(0).to(bias) if ctx.needs_input_grad[2] else None, None, None


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


def _apply(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Of the output of a linear layer."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
