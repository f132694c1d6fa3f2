"""Megatron-Core's fused cross entropy of logits whose vocabulary is sharded: ``tensor_parallel(parallel_loss=True)`` beside
``backend="megatron"``.

It is right for logits in bfloat16: Megatron rounds their gradient to that. What it does not have is done here: targets that are
ignored, and those outside of the vocabulary, for which it would return the logarithm of the sum alone. Its other function,
``vocab_parallel_cross_entropy``, knows no group but that of ``parallel_state``, and writes over float32 logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core import ScheduleError, ShardSpec

from ..process_state._megatron_private import fused_cross_entropy
from .parallel_layers import once


class FusedLosses(nn.Module):
    """The losses of tokens by Megatron's function, from this rank's columns of their logits.

    Args:
        others: Computes them from logits that are not in bfloat16, and of no tokens; called alike.
        spec: How the weight of the head is split, in equal parts.
    """

    def __init__(self, others: nn.Module, spec: ShardSpec) -> None:
        super().__init__()
        self.others, self.spec, self.fused = others, spec, fused_cross_entropy()

    def forward(self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """``[tokens]`` in float32 of ``[tokens, columns]``; 0 for targets that are ignored."""
        if logits.dtype is not torch.bfloat16 or not target.numel():
            losses: torch.Tensor = self.others(logits, target, ignore_index)
            return losses
        size, ignored = self.spec.full_shape[0], target == ignore_index
        compiling = torch.compiler.is_compiling()
        if not compiling and bool((~ignored & ((target < 0) | (target >= size))).any()):
            raise IndexError(f"a target is outside of the vocabulary of {size} and is not ignore_index ({ignore_index})")
        if logits.device.type == "cpu" and not compiling:
            losses = _Uncompiled.apply(self.fused, logits, target, self.spec.group)  # type: ignore[no-untyped-call]
        else:
            losses = self.fused(logits, target, self.spec.group)
        if losses.requires_grad and not compiling:
            losses.register_hook(_First())  # type: ignore[no-untyped-call]
        return once(losses).masked_fill(ignored, 0)


class _First:
    """Refuses a second backward: Megatron's first one writes over what it keeps."""

    done = False

    def __call__(self, grad: torch.Tensor) -> None:
        if self.done:
            raise ScheduleError("Megatron-Core's loss has one backward, as retain_graph=True asks for two; leave out backend")
        self.done = True


class _Uncompiled(torch.autograd.Function):
    """Megatron's function without its ``torch.compile``, forward and backward, which on a CPU asks for a C++ compiler."""

    @staticmethod
    def forward(ctx: Any, fused: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            ctx.logits = logits.detach().requires_grad_()
            ctx.losses = fused(ctx.logits, target, group)
        losses: torch.Tensor = ctx.losses.detach()
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        with torch.compiler.set_stance("force_eager"):
            (found,) = torch.autograd.grad(ctx.losses, ctx.logits, grad)
        return None, found, None, None
