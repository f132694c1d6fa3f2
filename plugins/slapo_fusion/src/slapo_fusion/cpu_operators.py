"""Operators for dropout, GELU and layer norm in compiled regions, which are faster on a CPU than the compiler's own code.

The compiler calls torch's whole dropout, which makes one tensor more and is slower than eager; here an operator draws the mask,
and the compiler fuses the product. It computes the ``erf`` of a GELU in the forward and again in the backward; here the forward
also computes the derivative, from the same ``exp``. Its layer norm reads the input three times, and torch's own kernel once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F


def custom_operator(
    name: str, function: Callable[..., Any], fake: Callable[..., Any] | None = None, tags: Sequence[torch.Tag] = ()
) -> Any:
    """Register a function as the operator ``slapo::name``; ``fake`` runs on fake tensors, by default the function itself."""
    operator = torch.library.custom_op(f"slapo::{name}", function, mutates_args=(), tags=tags)
    operator.register_fake(fake or function)
    return operator


class CpuLayer(nn.Module):
    """``nn.Dropout``, ``nn.GELU`` or ``nn.LayerNorm`` by a function of this module, with its settings at the time of a call."""

    def __init__(self, of: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.of, self.function, self.settings = of, function, _SETTINGS[type(of)]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.function(input, *[getattr(self.of, name) for name in self.settings])


_SETTINGS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Dropout: ("p", "training", "inplace"),
    nn.GELU: ("approximate",),
    nn.LayerNorm: ("normalized_shape", "weight", "bias", "eps"),
}
"""Attributes of each layer that are arguments of its function, in order."""


_DRAWS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)
_NUMBERS_PER_DRAW, _BITS_PER_NUMBER = 4, 16
"""Numbers per 64-bit draw, and bits per number."""


class DropoutFunction(Protocol):
    """A function with the arguments of ``F.dropout``."""

    def __call__(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor: ...


def _dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return the factor by which eager dropout multiplies ``x`` on a CPU, from the same random numbers."""
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def _fast_dropout_mask(x: torch.Tensor, dropped: int) -> torch.Tensor:
    """Return a mask that is True with probability ``1 - dropped / 65536``, four elements per draw of torch's generator."""
    bits = torch.empty(-(-x.numel() // _NUMBERS_PER_DRAW), dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    kept = bits.view(torch.int16)[: x.numel()] >= dropped - (1 << _BITS_PER_NUMBER - 1)
    return kept.view(x.shape)


dropout_mask = custom_operator("dropout_mask", _dropout_mask, lambda x, p: torch.empty_like(x), _DRAWS)
fast_dropout_mask = custom_operator(
    "fast_dropout_mask", _fast_dropout_mask, lambda x, dropped: torch.empty(x.shape, dtype=torch.bool), _DRAWS
)


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """``F.dropout``, with the mask from a custom operator on a CPU."""
    if not _uses_custom_mask(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    mask: torch.Tensor = dropout_mask(input.detach(), p)
    return input * mask


def fast_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout with masks that take a fraction of the time to draw.

    ``p`` is rounded to a multiple of 1/65536, and kept elements are scaled by the rounded value, so the mean is the input. If
    rounding changes ``p`` or ``1 - p`` by more than a thousandth of it, the masks are torch's.
    """
    if not _uses_custom_mask(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    dropped = round(p * (1 << _BITS_PER_NUMBER))
    rounded = dropped / (1 << _BITS_PER_NUMBER)
    if abs(rounded - p) > 1e-3 * min(p, 1 - p):
        return dropout(input, p, training, inplace)
    mask: torch.Tensor = fast_dropout_mask(input.detach(), dropped)
    return input * (mask.to(input.dtype) * (1 / (1 - rounded)))


def _uses_custom_mask(input: torch.Tensor, p: float, training: bool, inplace: bool) -> bool:
    return training and 0 < p < 1 and not inplace and type(input) is torch.Tensor and input.device.type == "cpu"


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


def _gelu_with_derivative(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GELU and its derivative of a float32 CPU tensor; the compiler inlines ``gelu_formula`` for it."""
    return F.gelu(z), torch.ops.aten.gelu_backward(torch.ones_like(z), z)


_gelu = custom_operator("gelu", _gelu_with_derivative, lambda z: (torch.empty_like(z), torch.empty_like(z)))
_gelu.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0], setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1])
)


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


_NormResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> _NormResult:
    """Return torch's layer norm, the mean, and the reciprocal of the standard deviation for the backward."""
    return torch.native_layer_norm(x, shape, weight, bias, eps)


def _norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: Sequence[bool],
) -> _NormResult:
    """Return the gradients of input, weight and bias; an empty tensor for each that is not wanted."""
    found = torch.ops.aten.native_layer_norm_backward(grad.contiguous(), x, shape, mean, rstd, weight, bias, wanted)
    first, second, third = (grad.new_empty(0) if each is None else each for each in found)
    return first, second, third


def _save(ctx: Any, inputs: tuple[Any, ...], output: _NormResult) -> None:
    x, ctx.shape, weight, bias, _ = inputs
    ctx.save_for_backward(x, *output[1:], weight, bias)


def _gradients(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    of_x, of_weight, of_bias = _layer_norm_backward(grad, x, ctx.shape, mean, rstd, weight, bias, wanted)
    given = [each if is_wanted else None for each, is_wanted in zip((of_x, of_weight, of_bias), wanted, strict=True)]
    return given[0], None, given[1], given[2], None


_layer_norm = custom_operator("layer_norm", _norm, tags=_DRAWS[1:])
_layer_norm_backward = custom_operator("layer_norm_backward", _norm_backward, tags=_DRAWS[1:])
_layer_norm.register_autograd(_gradients, setup_context=_save)


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.layer_norm``, as one operation that the compiler does not generate code for on a CPU."""
    given = [each for each in (input, weight, bias) if each is not None]
    if not all(type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu" for each in given):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    found: torch.Tensor = _layer_norm(input, list(normalized_shape), weight, bias, eps)[0]
    return found


def call_norm(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer with its present weights; use ``layer_norm`` if it is an ``nn.LayerNorm``."""
    if type(layer) is not nn.LayerNorm or len(args) != 1 or kwargs:
        return layer(*args, **kwargs)
    return layer_norm(args[0], layer.normalized_shape, layer.weight, layer.bias, layer.eps)
