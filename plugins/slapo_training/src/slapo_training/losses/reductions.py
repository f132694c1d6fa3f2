"""Reductions of losses over labels: the number of labels of each mean.

A loss is a mean over labels if operations that keep its value produced it from one such mean. Equal values prove nothing: a
cross entropy may be computed for a log alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slapo_core import BuildError
from slapo_tracing.nodes import in_function_transform

from ..distributed._torch_private import nll_mean_of, nll_means_in_graph
from ._torch_private import memory_place

_LOSSES: tuple[Callable[..., Any], ...] = (F.cross_entropy, F.nll_loss)
EQUAL_PARTS = (
    "say with loss_weights= what each term is a mean over, pad so that all have as many labels, or train with one micro-batch "
    "on one replica"
)
"""Remedies for a loss that is not a plain mean over labels."""
UNKNOWN_REDUCTION = (
    "micro-batches or ranks have different numbers of labels, and the labels that the loss averages over are "
    f"unknown, as it is not a plain cross_entropy; {EQUAL_PARTS}"
)
"""Message of the error for a loss that is not a plain mean, with uneven labels."""

_SIGNATURES = {loss: inspect.signature(loss) for loss in _LOSSES}


class LabelMean(NamedTuple):
    """A loss that is a mean over this number of labels, which excludes those of the value ``ignore_index``."""

    labels: int
    ignore_index: int


class CombinedMeans(NamedTuple):
    """A loss made of several means over labels, or of one and other values; ``terms`` are the means, sorted."""

    terms: tuple[LabelMean, ...]

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the terms, below 2**20; its squares can be summed exactly in float64."""
        return hash(self.terms) % 2**20


LossReduction = LabelMean | CombinedMeans | None
"""Reduction of a loss over labels: a mean, a combination of means, or None if unknown."""


def terms_of(reduction: LossReduction) -> tuple[LabelMean, ...]:
    """Return the known means that a loss is made of."""
    if isinstance(reduction, CombinedMeans):
        return reduction.terms
    return () if reduction is None else (reduction,)


def is_label_mean(mean: LossReduction) -> bool:
    return isinstance(mean, LabelMean)


class ReductionTracker(TorchFunctionMode):
    """Mode that records ``cross_entropy`` and ``nll_loss``, and tracks tensors computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[tuple[LabelMean, bool]] = []
        self._tracked: dict[int, _TrackedTensor] = {}
        self._zeros: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if in_function_transform():  # values under vmap cannot be read
            return func(*args, **kwargs)
        if func in _LOSSES:
            result = func(*args, **kwargs)
            given = _SIGNATURES[func].bind(*args, **kwargs)
            given.apply_defaults()
            self._record(result, given.arguments)
            return result
        sources = [found for value in _flat(args, kwargs) if (found := self._trace(value)) is not None] if self._losses else []
        factor = self._factor(func, args, kwargs, sources) if sources else None
        result = func(*args, **kwargs)
        if sources:
            self._track(result, sources, factor)
        elif func in _FACTORIES:
            self._record_zero(result)
        return result

    def reduction_of(self, loss: torch.Tensor) -> LossReduction:
        """Return the reduction of a loss that was computed within the mode.

        Raises:
            BuildError: the loss is a sum over labels, or a mean with class weights.
        """
        if (trace := self._trace(loss) or self._alias_of(loss)) is None:
            return None
        losses = [self._losses[index] for index in sorted(trace.losses)]
        if trace.factor != 1.0:
            return CombinedMeans(tuple(sorted(counted for counted, _ in losses)))
        ((counted, is_mean),) = losses
        if not is_mean:
            raise BuildError(
                "the loss sums over its labels, or weights their classes, so the mean of several parts is another number; take "
                "reduction='mean' without weight=, or train with one micro-batch on one replica"
            )
        return counted

    def labels_of(self, term: torch.Tensor) -> int | None:
        """Return the number of labels of a term that is a multiple of a mean over labels; None if unknown."""
        trace = self._trace(term) or self._alias_of(term)
        if trace is None or trace.factor is None:
            return None
        ((counted, is_mean),) = (self._losses[index] for index in trace.losses)
        return counted.labels if is_mean else None

    def _record(self, result: torch.Tensor, given: dict[str, Any]) -> None:
        if given["target"].is_floating_point():
            return
        legacy = given["size_average"] is not None or given["reduce"] is not None
        if legacy and given["weight"] is None and given["reduction"] == "mean":
            return
        counted = LabelMean(int((given["target"] != given["ignore_index"]).sum()), given["ignore_index"])
        self._losses.append((counted, given["reduction"] == "mean" and given["weight"] is None))
        factor = 1.0 if result.numel() == 1 and given["reduction"] != "none" else None
        self._tracked[id(result)] = _TrackedTensor(result, result._version, frozenset([len(self._losses) - 1]), factor)

    def _record_zero(self, result: Any) -> None:
        """Record a new tensor with one element that is 0; losses may be added to it."""
        if isinstance(result, torch.Tensor) and result.numel() == 1 and not result.requires_grad and not result.is_meta:
            self._zeros[id(result)] = (result, result._version) if not result.any() else (result, -1)

    def _trace(self, value: Any) -> _TrackedTensor | None:
        """Return the record of a tensor, or None if the tensor was modified since."""
        found = self._tracked.get(id(value))
        return found if found is not None and found.version == value._version else None

    def _alias_of(self, value: torch.Tensor) -> _TrackedTensor | None:
        """Return the record of a tensor on the same memory; an ``autograd.Function`` may return its input."""
        for found in self._tracked.values():
            tensor = found.tensor
            if tensor.numel() != 1 or value.numel() != 1 or tensor.dtype is not value.dtype:
                continue
            if memory_place(tensor) == memory_place(value):
                return found if found.version == tensor._version == value._version else None
        return None

    def _factor(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[_TrackedTensor]
    ) -> float | None:
        """Return the factor of the loss in a function's result; None if the result is not a multiple of one loss."""
        source, before = sources[0], sources[0].factor
        if any(each.tensor is not source.tensor for each in sources) or before is None or source.tensor.numel() != 1:
            return None
        if func in _DETACHING:
            return None if torch.is_grad_enabled() else before
        if func in _RESHAPING:
            others = [value for value in _flat(args, kwargs) if isinstance(value, torch.Tensor) and value is not source.tensor]
            return None if others else before
        if func not in _ARITHMETIC or kwargs or len(args) != 2:
            return None
        first, second = args
        if first is not source.tensor:
            return before * self._scale_of_operation(_ARITHMETIC[func], first) if _ARITHMETIC[func] in "+*" else None
        return before * self._scale_of_operation(_ARITHMETIC[func], second)

    def _scale_of_operation(self, sign: str, other: Any) -> float:
        """Return the factor by which an operation with another number scales its operand; NaN if it is not a scaling."""
        if isinstance(other, torch.Tensor):
            zero = self._zeros.get(id(other))
            other = 0 if sign in "+-" and zero is not None and zero[1] == other._version else None
        if not isinstance(other, int | float) or (sign in "+-" and other) or (sign == "/" and not other):
            return float("nan")
        return {"*": float(other), "/": 1 / other if other else 0.0}.get(sign, 1.0)

    def _track(self, result: Any, sources: list[_TrackedTensor], factor: float | None) -> None:
        losses = frozenset().union(*(source.losses for source in sources))
        for each in _flat((result,), {}):
            if isinstance(each, torch.Tensor) and each.numel() <= _MAX_TRACKED_NUMEL:
                self._tracked[id(each)] = _TrackedTensor(
                    each, each._version, losses, factor if each.numel() == 1 and factor == factor else None
                )


class _TrackedTensor(NamedTuple):
    """A tensor that was computed from losses.

    Args:
        tensor: The tensor; kept alive, so that its id stays unique.
        version: The tensor's version counter at the record.
        losses: Indices of the losses it was computed from.
        factor: Factor of the only loss; None if the tensor is not a multiple of one loss.
    """

    tensor: torch.Tensor
    version: int
    losses: frozenset[int]
    factor: float | None


_MAX_TRACKED_NUMEL = 2**20
"""Number of elements of the largest tracked tensor; losses have at most one element per token."""


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    """Return the functions of these names, of ``torch.Tensor`` and of ``torch``."""
    owners = (torch.Tensor, torch)
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


_RESHAPING = _functions(
    "clone contiguous view reshape squeeze unsqueeze flatten expand ravel __getitem__ select movedim atleast_1d view_as "
    "reshape_as mean sum stack cat to type float double half bfloat16 cpu cuda positive squeeze_ unsqueeze_ max min"
)
"""Functions that keep the value of a tensor with one element."""
_DETACHING = _functions("detach detach_") | {torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_ARITHMETIC: dict[Callable[..., Any], str] = {
    **dict.fromkeys(_functions("add add_"), "+"),
    **dict.fromkeys(_functions("sub sub_ subtract"), "-"),
    **dict.fromkeys(_functions("mul mul_ multiply"), "*"),
    **dict.fromkeys(_functions("div div_ true_divide divide"), "/"),
}
"""Arithmetic functions of two operands."""
_FACTORIES = _functions("zeros tensor zeros_like new_zeros new_tensor full scalar_tensor new_full as_tensor")


def reduction_in_graph(loss: torch.Tensor, is_searched: bool = False) -> LossReduction:
    """Return the reduction of a loss from its autograd graph; None if the graph shows none.

    Unless the graph ``is_searched`` for losses, only a loss that is a mean itself is accepted.
    """
    if (mean := nll_mean_of(loss)) is not None:
        return LabelMean(*mean)
    terms = [LabelMean(*each) for each in nll_means_in_graph(loss)] if is_searched else []
    return CombinedMeans(tuple(sorted(terms))) if terms else None


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Iterate over the arguments of a call, and over elements of lists and tuples."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
