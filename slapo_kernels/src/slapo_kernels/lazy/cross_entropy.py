"""Cross entropy of lazy logits, as one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..dispatch.dispatcher import run
from ..implementations._torch_private import backward_will_run


@dataclass
class GradientObservers:
    """Record of users that observe the gradient of logits, by a hook for example, or of the logits they are a view of.

    Args:
        base: Record of the logits they are a view of.
        has_observer: Whether the gradient of these logits is observed.
        has_loss: Whether a kernel computed a loss of these logits, or of a view of them.
    """

    base: GradientObservers | None = None
    has_observer: bool = False
    has_loss: bool = False

    def __bool__(self) -> bool:
        return self.has_observer or bool(self.base)

    def record_loss(self) -> None:
        """Record that a kernel computed a loss of these logits."""
        self.has_loss = True
        if self.base is not None:
            self.base.record_loss()


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Options of ``F.cross_entropy``, the forced implementation, and the dtypes of the loss and of the logits."""

    choice: str | None
    ignore_index: int
    reduction: str
    dtype: torch.dtype
    logits_dtype: torch.dtype


class LazyCrossEntropy(torch.autograd.Function):
    """``cross_entropy(logits, target)`` by the kernel, with gradients for hidden states, weight and bias.

    The gradient goes to the logits instead, which are recomputed, if it is observed, if a second derivative is needed, and in
    every backward after the first: the kernel's saved values serve one backward.

    Attributes:
        label_mean: On the loss's ``grad_fn``: the labels of the mean and the ignored label; None for a sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        logits: torch.Tensor,
        target: torch.Tensor,
        loss: CrossEntropyOptions,
        observers: GradientObservers,
    ) -> torch.Tensor:
        """Compute the loss from ``hidden`` and ``weight``; ``logits`` is an input for autograd alone."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.loss, ctx.observers = loss, observers
        ctx.label_mean = (target, loss.ignore_index) if loss.reduction == "mean" else None
        needs = ctx.needs_input_grad[:3]
        leaves = [
            None if each is None else each.detach().requires_grad_(need)
            for each, need in zip((hidden, weight, bias), needs, strict=True)
        ]
        with torch.set_grad_enabled(any(needs)), torch.autocast(hidden.device.type, enabled=False):
            found: torch.Tensor = run(
                "linear_cross_entropy",
                *leaves[:2],
                target,
                choice=loss.choice,
                bias=leaves[2],
                ignore_index=loss.ignore_index,
                reduction=loss.reduction,
            )
        ctx.once = (found, leaves) if any(needs) else None
        return found.detach().to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return gradients for hidden states, weight and bias, or for the logits."""
        if grad is None:
            return (None,) * 7
        nodes = ctx.next_functions[: 2 + ctx.needs_input_grad[2]]
        goes_past = any(node is not None and backward_will_run(node) for node, _ in nodes)
        if ctx.once is None or ctx.observers or torch.is_grad_enabled() or not goes_past:
            return None, None, None, _of_logits(ctx.saved_tensors, ctx.loss, grad), None, None, None
        (found, leaves), ctx.once = ctx.once, None
        wanted = [each for each in leaves if each is not None and each.requires_grad]
        gradients = iter(torch.autograd.grad(found, wanted, grad.to(found.dtype), allow_unused=True))
        past = [next(gradients) if each is not None and each.requires_grad else None for each in leaves]
        return (*past, None, None, None, None)


def _of_logits(saved: Sequence[Any], loss: CrossEntropyOptions, grad: torch.Tensor) -> torch.Tensor:
    hidden, weight, bias, target = saved
    again = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden, weight, bias).to(loss.logits_dtype)
        with torch.enable_grad():
            logits = logits if again else logits.requires_grad_()
            found = F.cross_entropy(logits, target, ignore_index=loss.ignore_index, reduction=loss.reduction).to(loss.dtype)
            (of_logits,) = torch.autograd.grad(found, logits, grad, create_graph=again)
    return of_logits


def is_labels(target: Any, logits: torch.Tensor, ignore_index: int) -> bool:
    """Return whether these are valid labels, one per row. On a GPU their values are not read: its kernels trap on a bad one."""
    if type(target) is not torch.Tensor or target.dtype is not torch.long or target.device != logits.device:
        return False
    if logits.dim() != 2 or target.shape != logits.shape[:1] or not len(target):
        return False
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return bool(((target >= 0) & (target < logits.shape[-1]) | (target == ignore_index)).all())


def dtype_of_loss(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype of a cross entropy of these logits, which autocast may change."""
    kind = logits.device.type
    if not torch.is_autocast_enabled(kind):
        return logits.dtype
    row = torch.zeros(1, 1, dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(row, torch.zeros(1, dtype=torch.long, device=logits.device)).dtype
