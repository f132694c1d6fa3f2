"""Megatron-Core's fused cross entropy of logits with a sharded vocabulary: ``tensor_parallel(parallel_loss=True)`` with
``backend="megatron"``.

Only bfloat16 logits use it, because Megatron rounds their gradient to bfloat16. This module adds ignored targets, and an
error for targets outside of the vocabulary, for which Megatron would return only the logarithm of the sum. Megatron's other
function, ``vocab_parallel_cross_entropy``, takes no process group but that of ``parallel_state``, and overwrites float32
logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slapo_core import ScheduleError, ShardSpec

from ..process_state._megatron_private import fused_cross_entropy
from .parallel_layers import refuse_double_backward


class FusedLosses(nn.Module):
    """Token losses by Megatron's function, from this rank's columns of the logits; all shards have the same size.

    The module ``others`` serves logits of other types and empty batches.
    """

    def __init__(self, others: nn.Module, spec: ShardSpec) -> None:
        super().__init__()
        self.others, self.spec, self.fused = others, spec, fused_cross_entropy()

    def forward(self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """Return float32 losses ``[tokens]`` of logits ``[tokens, columns]``; 0 for ignored targets."""
        if logits.dtype is not torch.bfloat16 or not target.numel():
            losses: torch.Tensor = self.others(logits, target, ignore_index)
            return losses
        size, ignored = self.spec.full_shape[0], target == ignore_index
        compiling = torch.compiler.is_compiling()
        if not compiling and bool((~ignored & ((target < 0) | (target >= size))).any()):
            raise IndexError(f"a target is outside of the vocabulary of {size} and is not ignore_index ({ignore_index})")
        if logits.device.type == "cpu" and not compiling:
            losses = _EagerCrossEntropy.apply(self.fused, logits, target, self.spec.group)  # type: ignore[no-untyped-call]
        else:
            losses = self.fused(logits, target, self.spec.group)
        if losses.requires_grad and not compiling:
            losses.register_hook(_SingleBackwardHook())  # type: ignore[no-untyped-call]
        return refuse_double_backward(losses).masked_fill(ignored, 0)


class _SingleBackwardHook:
    """Gradient hook that refuses a second backward: Megatron's first one overwrites its saved tensors."""

    done = False

    def __call__(self, grad: torch.Tensor) -> None:
        if self.done:
            raise ScheduleError("Megatron-Core's loss has one backward, as retain_graph=True asks for two; leave out backend")
        self.done = True


class _EagerCrossEntropy(torch.autograd.Function):
    """Autograd node that runs Megatron's function without its ``torch.compile``, which on a CPU needs a C++ compiler."""

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
