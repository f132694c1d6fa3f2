"""Layer norms in compiled regions: torch's own kernel on a CPU, which reads its input once.

The compiler's code for a layer norm reads the input three times there, which costs more than fusion saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_TAGS = (torch.Tag.needs_exact_strides,)
_PLAIN = (torch.Tensor, nn.Parameter)
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
    of_x, of_weight, of_bias = _backward(grad, x, ctx.shape, mean, rstd, weight, bias, wanted)
    given = [each if is_wanted else None for each, is_wanted in zip((of_x, of_weight, of_bias), wanted, strict=True)]
    return given[0], None, given[1], given[2], None


_forward = torch.library.custom_op("slapo::layer_norm", _norm, mutates_args=(), tags=_TAGS)
_forward.register_fake(_norm)
_backward = torch.library.custom_op("slapo::layer_norm_backward", _norm_backward, mutates_args=(), tags=_TAGS)
_backward.register_fake(_norm_backward)
_forward.register_autograd(_gradients, setup_context=_save)


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.layer_norm``, as one operation that the compiler does not generate code for on a CPU."""
    if not all(type(each) in _PLAIN and each.device.type == "cpu" for each in (input, weight, bias) if each is not None):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    found: torch.Tensor = _forward(input, list(normalized_shape), weight, bias, eps)[0]
    return found


class LayerNorm(nn.Module):
    """Layer norm by ``layer_norm``, with the settings of an ``nn.LayerNorm`` at the time of the call."""

    def __init__(self, of: nn.LayerNorm) -> None:
        super().__init__()
        self.of = of

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply ``layer_norm`` with the present settings."""
        return layer_norm(input, self.of.normalized_shape, self.of.weight, self.of.bias, self.of.eps)


def call_norm(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer with its present weights; use ``layer_norm`` if it is an ``nn.LayerNorm``."""
    if type(layer) is not nn.LayerNorm or len(args) != 1 or kwargs:
        return layer(*args, **kwargs)
    return layer_norm(args[0], layer.normalized_shape, layer.weight, layer.bias, layer.eps)
