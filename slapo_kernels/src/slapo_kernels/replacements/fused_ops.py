"""The steps of a program: calls of a module's parts, and of kernels in the place of what is between them."""

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
"""Inputs of a program, then the result of each step."""


@dataclass(frozen=True)
class Call:
    """A step: call a part of the module."""

    part: str
    args: tuple[int, ...]
    kernel: ClassVar[str | None] = None

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        result: torch.Tensor = module._modules[self.part](*[values[index] for index in self.args])
        return result


@dataclass(frozen=True)
class Activate:
    """A step: an activation, with the bias of the linear layer ``part`` where that can be had apart."""

    arg: int
    activation: str
    part: str | None
    kernel: ClassVar[str] = "bias_act"

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        x, bias = _product(module, self.part, values[self.arg], self.kernel, choice)
        found: torch.Tensor = run("bias_act", x, bias, choice=choice, activation=self.activation)
        return found


@dataclass(frozen=True)
class Gate:
    """A step: one value, activated, times another; or one half of a value times the other."""

    kernel: str
    gate: int
    up: int
    options: tuple[tuple[str, Any], ...]
    gate_first: bool = True

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        gate, up = values[self.gate], values[self.up]
        if self.gate == self.up:
            first, second = values[self.gate].chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
        found: torch.Tensor = run(self.kernel, gate, up, choice=choice, **dict(self.options))
        return found


@dataclass(frozen=True)
class AddDropped:
    """A step: a residual sum with what the module's ``dropout`` leaves of a value, and of the bias of ``part``."""

    arg: int
    residual: int
    dropout: str
    part: str | None
    kernel: ClassVar[str] = "bias_dropout_residual"

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        x, bias = _product(module, self.part, values[self.arg], self.kernel, choice)
        dropout = module._modules[self.dropout]
        residual = values[self.residual]
        found: torch.Tensor = run(self.kernel, x, bias, residual, choice=choice, p=dropout.p, training=dropout.training)
        return found


Step = Call | Activate | Gate | AddDropped


def _product(
    module: Any, part: str | None, x: torch.Tensor, kernel: str, choice: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the linear layer ``part`` makes of ``x`` without its bias, and the bias; together where that is as fast.

    Or where the layer may be more than a product: hooked, wrapped, sharded, or of another forward.
    """
    if part is None:
        return x, None
    linear = module._modules[part]
    bias, transposed = linear.bias, is_conv1d(linear)
    plain = transposed or type(linear).forward is nn.Linear.forward
    if (
        bias is None
        or not plain
        or torch.compiler.is_compiling()  # before the next, which the compiler cannot follow
        or is_opaque(linear)
        or not _fuses(kernel, choice, x.device.type, x.dtype)
    ):
        return linear(x), None
    x = x @ linear.weight if transposed else F.linear(x, linear.weight)
    return x, bias.to(x.dtype)


@functools.cache
def _fuses(kernel: str, choice: str | None, device: str, dtype: torch.dtype) -> bool:
    """Whether an implementation adds a bias at no cost, as one operation with the rest."""
    return choose(kernel, device, dtype, choice).name != "eager"
