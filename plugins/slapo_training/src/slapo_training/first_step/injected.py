"""Gradients that a model injects into its backward, beside those of its loss, and what makes them right.

A router's balance loss, say, enters by an ``autograd.Function`` that hands on its input and adds a gradient of its own. The
backward of a micro-batch from ``s`` times its loss then gives ``s * dL + I``. An engine that divides each loss by the number of
micro-batches would take ``I`` as often as there are micro-batches. Where gradients are injected it runs each backward from the
loss as the whole batch weighs it, not divided, and divides the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._torch_private import first_hook, leaves_of, without_hooks

IN_FP16 = (
    "the model injects gradients into its backward, which the loss scale of precision='fp16' would not scale; use "
    "precision='bf16', or add the auxiliary loss to the loss"
)
"""Said where the loss is multiplied by a scale that the injected gradients do not know."""


def is_injected(received: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> bool:
    """Return whether a backward from gradients of zero gives any other gradient.

    Args:
        received: What a stage got; a gradient of these counts too.
        given: What it returned, with its graph.
    """
    ends = [tensor for tensor in given if tensor.requires_grad]
    leaves = [*{id(each): each for each in [*leaves_of(ends), *(x for x in received if x.requires_grad)]}.values()]
    if not ends or not leaves:
        return False
    zeros = [torch.zeros_like(tensor) for tensor in ends]
    with without_hooks(leaves):
        gradients = torch.autograd.grad(ends, leaves, zeros, allow_unused=True)
    found = [_is_something(gradient) for gradient in gradients if gradient is not None]
    return bool(torch.stack([each.to(found[0].device) for each in found]).any()) if found else False


def _is_something(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (values.isfinite() & (values != 0)).any()  # zero times infinity is no gradient of anybody's


class _Scaled(torch.autograd.Function):
    """Hands on a loss; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss.clone()  # a runtime may detach it in place, which a view refuses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scaled_gradient(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the same loss, whose backward starts from ``factor`` times its gradient."""
    if factor == 1.0 or not loss.requires_grad:
        return loss
    scaled: torch.Tensor = _Scaled.apply(loss, factor)  # type: ignore[no-untyped-call]
    return scaled


class GradientScale:
    """Divides the gradients of parameters as a backward makes them, before an engine takes or reduces them.

    Args:
        parameters: Those of this rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    @contextmanager
    def dividing(self, number: float) -> Iterator[None]:
        """Divide those of the backwards inside by ``number``."""
        if number == 1.0:
            yield
            return
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        handles = [first_hook(parameter, lambda gradient: gradient / number) for parameter in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
