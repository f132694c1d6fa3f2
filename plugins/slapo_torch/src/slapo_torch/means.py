"""Losses that are means over labels: how many each micro-batch has, and what it then weighs in the loss of the batch."""

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


class LabelCount:
    """About how many labels a micro-batch has: as many as in the step before, so that shares need no correction.

    Attributes:
        value: Equal on all ranks; 0 before the first step.
    """

    value: float = 0.0

    def state(self) -> float:
        """What a checkpoint keeps, so that steps after it round as they would have."""
        return self.value

    def put(self, state: float) -> None:
        """Go on from ``state``."""
        self.value = state


class Share(NamedTuple):
    """What the loss of each micro-batch adds to the loss of the batch.

    A loss over n labels is taken ``n / (parts * unit)`` times, and in the end all by ``parts * unit / N`` for N labels in all.
    A loss of which it is not known what it is a mean over is taken ``1 / parts`` times, as are all others then.

    Args:
        parts: Micro-batches of each replica.
        unit: About as many labels as a micro-batch has, equal on all ranks.
        differs: Whether micro-batches or ranks have different numbers of labels, so that theirs have to be known.
        scale: What all is multiplied by beside, with fp16.
        is_all: Whether there is no other micro-batch on any rank.
    """

    parts: int
    unit: float = 1.0
    differs: bool = False
    scale: float = 1.0
    is_all: bool = False

    def of(self, loss: torch.Tensor, counted: Counted | None) -> torch.Tensor:
        """This share of a loss, which is a mean over ``counted`` labels."""
        if counted is None or counted.labels == self.unit:
            return loss * self.scale / self.parts if self.scale != 1.0 else loss / self.parts
        known = loss if counted.labels else loss.nan_to_num()  # of no labels a mean is not a number
        return known * (self.scale * counted.labels / (self.parts * self.unit))
