"""Operations of a fused forward: calls of a module's children, and kernels for the operations between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from slapo_tracing.nodes import is_opaque

from ..dispatch.dispatcher import choose, run
from .meta_copies import is_conv1d

Values = list[torch.Tensor]
"""Inputs of a fused forward, then the result of each operation so far."""


@dataclass(frozen=True)
class LayerCall:
    """Call of a child of the module."""

    part: str
    args: tuple[int, ...]
    kernel: ClassVar[str | None] = None

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        result: torch.Tensor = module._modules[self.part](*[values[index] for index in self.args])
        return result


@dataclass(frozen=True)
class BiasActivation:
    """Activation, fused with the bias of the linear layer ``part`` if the layer is a plain product and sum."""

    arg: int
    activation: str
    part: str | None
    kernel: ClassVar[str] = "bias_act"

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        x, bias = _product_and_bias(module, self.part, values[self.arg], self.kernel, choice)
        found: torch.Tensor = run("bias_act", x, bias, choice=choice, activation=self.activation)
        return found


@dataclass(frozen=True)
class GatedActivation:
    """Product of an activated value with another, or of the two halves of one value."""

    kernel: str
    gate: int
    up: int
    options: tuple[tuple[str, Any], ...]
    gate_first: bool = True

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        gate, up = values[self.gate], values[self.up]
        if self.gate == self.up:
            first, second = values[self.gate].chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
        found: torch.Tensor = run(self.kernel, gate, up, choice=choice, **dict(self.options))
        return found


@dataclass(frozen=True)
class DropoutResidual:
    """Residual sum with the dropout of a value, fused with the bias of the linear layer ``part``."""

    arg: int
    residual: int
    dropout: str
    part: str | None
    kernel: ClassVar[str] = "bias_dropout_residual"

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        x, bias = _product_and_bias(module, self.part, values[self.arg], self.kernel, choice)
        dropout = module._modules[self.dropout]
        residual = values[self.residual]
        found: torch.Tensor = run(self.kernel, x, bias, residual, choice=choice, p=dropout.p, training=dropout.training)
        return found


FusedOp = LayerCall | BiasActivation | GatedActivation | DropoutResidual


def _product_and_bias(
    module: Any, part: str | None, x: torch.Tensor, kernel: str, choice: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the product of the linear layer ``part`` and its bias; or the layer's result and None.

    The layer is called as a whole if the kernel does not fuse the bias, or if the layer may be more than a product: if it has
    hooks, wrappers, shards or another forward.
    """
    if part is None:
        return x, None
    linear = module._modules[part]
    bias, transposed = linear.bias, is_conv1d(linear)
    plain = transposed or type(linear).forward is nn.Linear.forward
    if (
        bias is None
        or not plain
        or torch.compiler.is_compiling()  # must come before ``is_opaque``, which the compiler cannot trace
        or is_opaque(linear)
        or not _fuses_bias(kernel, choice, x.device.type, x.dtype)
    ):
        return linear(x), None
    x = x @ linear.weight if transposed else F.linear(x, linear.weight)
    return x, bias.to(x.dtype)


@functools.cache
def _fuses_bias(kernel: str, choice: str | None, device: str, dtype: torch.dtype) -> bool:
    """Return whether the implementation computes the bias and the rest as one operation."""
    return choose(kernel, device, dtype, choice).name != "eager"
