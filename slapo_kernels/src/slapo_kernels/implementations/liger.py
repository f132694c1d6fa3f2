"""Kernels of the package Liger-Kernel.

Liger's rotary embedding is left out: it overwrites its inputs and the incoming gradients. Where a backward of Liger
overwrites saved tensors, it gets a copy, so that a graph can run backward twice.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from .eager import check_cast
from .native import fused_cross_entropy

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, cast: str = "input") -> Tensor:
    """``LigerRMSNormFunction``, with ``in_place=False``: its backward does not overwrite the incoming gradient."""
    from liger_kernel.ops import LigerRMSNormFunction

    check_cast(cast)
    mode = "gemma" if cast == "weight" else "llama"
    out: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, mode, False)
    return out


def refuses_rms_norm(x: Tensor, weight: Tensor, **options: Any) -> str | None:
    """Return the reason why Liger's result differs from torch's, or None."""
    return None if x.dtype is weight.dtype else f"takes one dtype, not {x.dtype} and {weight.dtype}"


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """``LigerLayerNormFunction``."""
    from liger_kernel.ops import LigerLayerNormFunction

    out: Tensor = LigerLayerNormFunction.apply(x, weight, bias, eps)
    return out


def refuses_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any) -> str | None:
    """Return the reason why Liger cannot compute the call, or computes something else than torch; or None."""
    if weight is None or bias is None:
        return "takes a weight and a bias"
    if torch.is_autocast_enabled(x.device.type):
        return "does not give float32 under autocast, as torch does"
    return None if x.dtype is weight.dtype is bias.dtype else f"takes one dtype, not {x.dtype} and {weight.dtype}"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Liger's ``swiglu_forward`` and ``swiglu_backward``."""
    out: Tensor = _gate_function("swiglu").apply(gate, up)
    return out


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Liger's ``geglu_forward`` and ``geglu_backward``, of the tanh approximation alone."""
    out: Tensor = _gate_function("geglu").apply(gate, up)
    return out


def refuses_swiglu(gate: Tensor, up: Tensor) -> str | None:
    """Return the reason why Liger cannot compute the call, or None."""
    if gate.shape != up.shape or gate.dtype is not up.dtype:
        return "takes two values of one shape and dtype"
    return None


def refuses_geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> str | None:
    """Return the reason why Liger cannot compute the call, or None."""
    return "knows the tanh approximation of gelu alone" if approximate != "tanh" else refuses_swiglu(gate, up)


@functools.cache
def _gate_function(name: str) -> Any:
    """Return an autograd function of Liger's forward and backward; the backward gets copies, as it overwrites its inputs."""
    import liger_kernel.ops as ops

    forward_kernel, backward_kernel = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")

    class GateFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.contiguous(), up.contiguous()
            ctx.save_for_backward(gate, up)
            out: Tensor = forward_kernel(gate, up)[2]
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = (saved.clone().view(-1, saved.shape[-1]) for saved in ctx.saved_tensors)
            of_gate, of_up = backward_kernel(gate, up, grad.contiguous())
            return of_gate, of_up

    return GateFunction


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """``LigerFusedLinearCrossEntropyFunction``, which computes gradients in the forward; only the first backward is right."""
    return fused_cross_entropy(_loss, hidden, weight, labels, **options)


def _loss(rows: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    settings = {"ignore_index": ignore_index, "reduction": reduction, "accum_dtype": torch.float32}
    positions = list(inspect.signature(LigerFusedLinearCrossEntropyFunction.forward).parameters.values())[5:]
    rest = [settings.get(each.name, each.default) for each in positions]
    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(rows, weight, labels, bias, *rest)[0].float()
    return loss


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """``LigerEmbeddingFunction``, which adds gradients up in the dtype of the weight, in any order."""
    from liger_kernel.ops import LigerEmbeddingFunction

    out: Tensor = LigerEmbeddingFunction.apply(weight, ids)
    return out


def refuses_embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> str | None:
    """Return the reason why Liger cannot compute the call, or None."""
    return None if padding_idx is None else "gives the row of padding_idx gradients"
