"""Detection and scaling of gradients that a model injects into its backward beside those of its loss.

For example, a router's balance loss may be an ``autograd.Function`` that returns its input and adds a gradient of its own. The
backward of ``s`` times a micro-batch's loss then gives ``s * dL + I``. If an engine divided each loss by the number of
micro-batches, ``I`` would count once per micro-batch. So the engine does not divide the loss, but the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..distributed._torch_private import has_inner_backward, leaves_of, register_first, without_hooks


class InjectionProbe:
    """Runs backwards of stages from zero gradients; each nonzero gradient was injected.

    Args:
        accumulates: True if a backward may accumulate gradients in parameters; False if the engine waits for these.

    Attributes:
        probes: A linear probe and the norm of each injected gradient, by id of its tensor.
        is_hidden: True if a backward was skipped because it would accumulate gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], accumulates: bool) -> None:
        self._parameters, self._accumulates = list(parameters), accumulates
        self.probes: dict[int, torch.Tensor] = {}
        self.is_hidden = False

    def __call__(self, received: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> bool:
        """Return True if a stage's backward injects gradients; those of the tensors that it received count, too."""
        ends = [tensor for tensor in given if tensor.requires_grad]
        inputs = [tensor for tensor in received if tensor.requires_grad]
        if not ends:
            return False
        if not has_inner_backward(ends):
            leaves = [*{id(each): each for each in [*leaves_of(ends), *inputs]}.values()]
            gradients = self._gradients(ends, leaves)
        elif self._accumulates:
            leaves = [*self._parameters, *inputs]
            gradients = self._accumulated_gradients(ends, leaves)
        else:
            self.is_hidden = True
            return False
        found = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
        flags = [_is_nonzero(gradient).to(ends[0].device) for _, gradient in found]
        if not flags or not bool(torch.stack(flags).any()):
            return False
        self.probes.update({id(leaf): _probe(gradient) for leaf, gradient in found if isinstance(leaf, nn.Parameter)})
        return True

    def _gradients(self, ends: list[torch.Tensor], leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        if not leaves:
            return ()
        with without_hooks(leaves):
            return torch.autograd.grad(ends, leaves, [torch.zeros_like(each) for each in ends], allow_unused=True)

    def _accumulated_gradients(self, ends: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        with without_hooks(leaves):
            torch.autograd.backward(ends, [torch.zeros_like(each) for each in ends])
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found


def is_mean_over_rows(
    whole: InjectionProbe, parts: Sequence[InjectionProbe], weights: Sequence[float], tolerance: float
) -> bool:
    """Return True if the gradients injected for all rows are the mean of those injected for their parts.

    ``weights`` are the fractions of the rows in each part, ``tolerance`` the largest relative difference that counts as
    equal.
    """
    for key, one in whole.probes.items():
        others = [each.probes.get(key, torch.zeros_like(one)) for each in parts]
        mean = sum(other[0].item() * weight for other, weight in zip(others, weights, strict=True))
        size = max(each[1].item() for each in (one, *others))
        if abs(one[0].item() - mean) > tolerance * size:
            return False
    return True


def _probe(gradient: torch.Tensor) -> torch.Tensor:
    values = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    values = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).float()
    return torch.stack([values.sum() + values[::3].sum(), values.norm()]).nan_to_num()


def _is_nonzero(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (values.isfinite() & (values != 0)).any()  # 0 * inf = nan is no injected gradient


class _ScaleGradient(torch.autograd.Function):
    """Autograd node that returns a loss and multiplies its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss.clone()  # the pipeline runtime calls detach_(), which views refuse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scaled_gradient(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the same loss; its backward multiplies the gradient by ``factor``."""
    if factor == 1.0 or not loss.requires_grad:
        return loss
    scaled: torch.Tensor = _ScaleGradient.apply(loss, factor)  # type: ignore[no-untyped-call]
    return scaled


@contextmanager
def divide_gradients(parameters: Iterable[nn.Parameter], number: float) -> Iterator[None]:
    """Context in which backwards divide gradients of parameters by ``number``, before an engine reads or reduces them."""
    with ExitStack() as hooks:
        for parameter in parameters if number != 1.0 else ():
            if parameter.requires_grad:
                hooks.enter_context(register_first(parameter, lambda gradient: gradient / number))
        yield
