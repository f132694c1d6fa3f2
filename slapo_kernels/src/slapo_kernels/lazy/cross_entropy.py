"""The cross entropy of logits that are not there, as one operation of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..dispatch.dispatcher import run
from ..implementations._torch_private import will_run


@dataclass
class Watch:
    """Whether somebody waits for the gradient of logits, or of those they are a view of.

    Args:
        above: Of those they are a view of.
        is_set: Whether somebody waits for that of these.
        has_loss: Whether there is a loss of these, or of a view of them, that a kernel computed.
    """

    above: Watch | None = None
    is_set: bool = False
    has_loss: bool = False

    def __bool__(self) -> bool:
        return self.is_set or bool(self.above)

    def note_loss(self) -> None:
        """A kernel computes a loss of these."""
        self.has_loss = True
        if self.above is not None:
            self.above.note_loss()


@dataclass(frozen=True)
class Loss:
    """How a cross entropy is computed.

    Args:
        choice: Implementation that a user has chosen.
        ignore_index: As ``F.cross_entropy``.
        reduction: As ``F.cross_entropy``.
        dtype: Of the loss.
        of: That of the logits.
    """

    choice: str | None
    ignore_index: int
    reduction: str
    dtype: torch.dtype
    of: torch.dtype


class LazyLoss(torch.autograd.Function):
    """``cross_entropy(logits, target)``, by the kernel; its gradients go past the logits to what these are made of.

    They go by the logits, which are computed again, where somebody waits for their gradient, where gradients of gradients are
    asked for, and from the second time on: what kernels keep is good for once.

    Attributes:
        label_mean: Of the loss's ``grad_fn``: the labels that it is a mean over, and the one it leaves out; None of a sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        logits: torch.Tensor,
        target: torch.Tensor,
        loss: Loss,
        watch: Watch,
    ) -> torch.Tensor:
        """As the kernel computes it of ``hidden`` and ``weight``; of ``logits`` only autograd hears."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.loss, ctx.watch = loss, watch
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
        """To hidden states, weight and bias, or to the logits."""
        if grad is None:
            return (None,) * 7
        goes_past = any(node is not None and will_run(node) for node, _ in ctx.next_functions[: 2 + (ctx.needs_input_grad[2])])
        if ctx.once is None or ctx.watch or torch.is_grad_enabled() or not goes_past:
            return None, None, None, _of_logits(ctx.saved_tensors, ctx.loss, grad), None, None, None
        (found, leaves), ctx.once = ctx.once, None
        wanted = [each for each in leaves if each is not None and each.requires_grad]
        gradients = iter(torch.autograd.grad(found, wanted, grad.to(found.dtype), allow_unused=True))
        past = [next(gradients) if each is not None and each.requires_grad else None for each in leaves]
        return (*past, None, None, None, None)


def _of_logits(saved: Sequence[Any], loss: Loss, grad: torch.Tensor) -> torch.Tensor:
    hidden, weight, bias, target = saved
    again = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden, weight, bias).to(loss.of)
        with torch.enable_grad():
            logits = logits if again else logits.requires_grad_()
            found = F.cross_entropy(logits, target, ignore_index=loss.ignore_index, reduction=loss.reduction).to(loss.dtype)
            (of_logits,) = torch.autograd.grad(found, logits, grad, create_graph=again)
    return of_logits
