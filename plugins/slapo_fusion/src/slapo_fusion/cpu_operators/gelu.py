"""Exact GELU in compiled regions: on a CPU the forward also computes the derivative, from the same ``exp``.

Without it, the compiler computes ``erf`` in the forward and again in the backward, which costs more than fusion saves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

_SCALE = 0.35
_DENSITY = 1 / math.sqrt(2 * math.pi)
_TAIL = (
    0.13962130610771162,
    0.13986352896658782,
    0.11982118464572014,
    0.10555292709627942,
    -0.023213394293824303,
    0.15932125372865752,
    -0.25584040270771574,
    0.14403161070100387,
    -0.029158030231036962,
)
"""``(1 - erf(z / sqrt(2))) / 2 * exp(z * z / 2)`` for ``z >= 0`` as a polynomial in ``u = 1 / (1 + 0.35 z)``, from ``u`` up.

Fitted to ``torch.special.erfcx`` in float64 for the least relative error, 3.2e-8 up to ``z = 14.5``, where float32 ends.
"""


@torch.library.custom_op("slapo::gelu", mutates_args=())
def _gelu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GELU and its derivative of a float32 CPU tensor; the compiler inlines ``gelu_formula`` for it."""
    return F.gelu(z), torch.ops.aten.gelu_backward(torch.ones_like(z), z)


@_gelu.register_fake
def _(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(z), torch.empty_like(z)


def _save_derivative(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
    found: torch.Tensor = grad * ctx.saved_tensors[0]
    return found


_gelu.register_autograd(_gradient, setup_context=_save_derivative)


def gelu_formula(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GELU and its derivative by elementwise operations: ``z`` times the normal distribution function of ``z``.

    It is as accurate as torch's GELU, and more accurate for ``z`` far below 0.
    """
    density = torch.exp(-0.5 * z * z)
    u = 1 / (1 + _SCALE * z.abs())
    tail = _TAIL[-1] * u
    for factor in _TAIL[-2::-1]:
        tail = (tail + factor) * u
    tail = tail * density
    below = torch.where(z > 0, 1 - tail, tail)
    return z * below, below + z * (density * _DENSITY)


def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``F.gelu``; in compiled code, the exact GELU of a float32 CPU tensor uses the custom operator.

    It has no second derivative, as compiled code has none.
    """
    is_plain = type(input) is torch.Tensor and input.device.type == "cpu" and input.dtype == torch.float32
    if approximate != "none" or not is_plain or not torch.compiler.is_compiling():
        return F.gelu(input, approximate=approximate)
    found: torch.Tensor = _gelu(input)[0]
    return found


class Gelu(nn.Module):
    """GELU by ``gelu``, with the settings of an ``nn.GELU`` at the time of the call."""

    def __init__(self, of: nn.GELU) -> None:
        super().__init__()
        self.of = of

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply ``gelu`` with the present settings."""
        return gelu(input, self.of.approximate)


def options_for(region: fx.GraphModule) -> dict[str, Any]:
    """Return options of inductor for a region: those of the inlining pass if the region uses ``gelu``."""
    graphs = [part.graph for part in region.modules() if isinstance(part, fx.GraphModule)]
    calls = any(graph.find_nodes(op="call_function", target=gelu) for graph in graphs)
    if not calls and not any(isinstance(part, Gelu) for part in region.modules()):
        return {}
    from . import _torch_inductor_pass  # noqa: PLC0415 - takes seconds

    return _torch_inductor_pass.options({torch.ops.slapo.gelu.default: gelu_formula})
