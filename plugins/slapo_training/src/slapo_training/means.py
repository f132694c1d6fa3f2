"""Losses that are means over labels: how many labels each of them has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slapo_core.errors import BuildError

from ._torch_private import nll_mean_of

_LOSSES: tuple[Callable[..., Any], ...] = (F.cross_entropy, F.nll_loss)
EQUAL_PARTS = "pad so that all have as many labels, or train with one micro-batch on one replica"
"""What to do about a loss that is no plain mean over labels."""

_SIGNATURES = {loss: inspect.signature(loss) for loss in _LOSSES}


class Counted(NamedTuple):
    """What one loss was a mean over.

    Args:
        labels: How many labels entered it.
        ignore_index: The label that it leaves out.
    """

    labels: int
    ignore_index: int


class CountedMeans(TorchFunctionMode):
    """Inside of it the losses that are means over labels, ``cross_entropy`` and ``nll_loss``, are noted with their labels."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[tuple[torch.Tensor, Counted]] = []
        self._others: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function."""
        result = func(*args, **(kwargs or {}))
        if func in _LOSSES:
            given = _given(func, args, kwargs or {})
            if (counted := _counted(given)) is not None:
                self._means.append((result, counted))
            elif _is_unlike_a_mean(given):
                self._others.append(result)
        return result

    def behind(self, loss: torch.Tensor) -> Counted | None:
        """What this loss is a mean over; None where it is none of those noted, or more than one of them.

        Raises:
            BuildError: the loss is a sum over labels, or a mean with weights for classes.
        """
        if any(other is loss for other in self._others):
            raise BuildError(
                "the loss sums over its labels, or weights their classes, so the mean of several parts is another number; take "
                "reduction='mean' without weight=, or train with one micro-batch on one replica"
            )
        return next((counted for mean, counted in self._means if _same(mean, loss)), None)


def told_by(loss: torch.Tensor) -> Counted | None:
    """What a loss is a mean over, where it needs a gradient and itself is a ``cross_entropy`` or ``nll_loss``; else None."""
    told = nll_mean_of(loss)
    return Counted(*told) if told is not None else None


def _given(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name, defaults included."""
    given = _SIGNATURES[func].bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _counted(given: dict[str, Any]) -> Counted | None:
    target, ignored = given["target"], given["ignore_index"]
    legacy = given["size_average"] is not None or given["reduce"] is not None
    if given["weight"] is not None or legacy or given["reduction"] != "mean" or target.is_floating_point():
        return None
    return Counted(int((target != ignored).sum()), ignored)


def _is_unlike_a_mean(given: dict[str, Any]) -> bool:
    """Whether a loss is one number, of a sum or of weighted classes."""
    return given["reduction"] == "sum" or (given["reduction"] == "mean" and given["weight"] is not None)


def _same(mean: torch.Tensor, loss: torch.Tensor) -> bool:
    """Whether a loss is this number; of no labels it is none."""
    if mean is loss:
        return True
    one, other = mean.detach().double().reshape(()), loss.detach().double().reshape(())
    return bool(one == other) or bool(one.isnan() and other.isnan())
