"""Losses of several terms, each a mean over its own count: the option ``loss_weights``.

Counts are computed from the batch, which every rank of a pipeline has. So the weight of each term is known before the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slapo_core import BuildError, Program, gather_objects

from ..batches.microbatches import Batch
from ..batches.nested_tensors import fields_of, tensors_of
from ..distributed.ranks import reduce_over_replicas
from .microbatch_loss import LossFn, MicroBatchLoss, one_number
from .output_loss import OutputLoss
from .reductions import ReductionTracker

Count = str | Callable[..., Any]
"""Count of a term: the name of an argument of the batch, or a function of some of them."""

_WHOLE = ""
"""Name of the only term if ``loss_weights`` is a single count."""
_MASKS = ("mask", "weight", "valid", "keep")
_LABELS = ("label", "target")


def check_counts(given: Any) -> None:
    """Raise ``BuildError`` for a value of ``loss_weights`` that cannot work."""
    terms = given if isinstance(given, Mapping) else {_WHOLE: given}
    for name, count in terms.items():
        if not isinstance(name, str) or not (isinstance(count, str) or callable(count)):
            what = f"loss_weights[{name!r}]" if isinstance(given, Mapping) else "loss_weights"
            raise BuildError(f"{what} is {count!r}; give the name of an argument of the batch, or a function of arguments")
    if not terms:
        raise BuildError("loss_weights names no term; leave it out, or give a count for each term of the loss")


class LossTerms:
    """Weights the terms of each micro-batch's loss by their counts.

    Args:
        loss_fn: Function that returns the terms; None to take them from the model's output.
        output_loss: Finds the loss in the model's output if there is one term.
    """

    def __init__(
        self,
        given: Any,
        program: Program,
        loss_fn: LossFn | None,
        ignored: int,
        device: torch.device,
        output_loss: OutputLoss | None = None,
    ) -> None:
        self._counts: dict[str, Count] = dict(given) if isinstance(given, Mapping) else {_WHOLE: given}
        self.names = [*self._counts]
        self._program, self._loss_fn, self._ignored, self._device = program, loss_fn, ignored, device
        self._output_loss = output_loss or OutputLoss()
        self._seen: set[str] = set()
        self._own: list[list[float]] = []
        self._checked: set[bool] = set()
        self._recorded: list[tuple[str, float, int]] = []

    def count(self, parts: Sequence[Batch]) -> None:
        """Compute the counts of these micro-batches, with no message to other ranks.

        Raises:
            BuildError: the batch has no such argument, or a count is negative or not finite.
        """
        counts = [self._number(name, count, part) for part in parts for name, count in self._counts.items()]
        numbers = torch.stack([each.to(counts[0].device) for each in counts]).tolist()
        for name, number in zip(self.names * len(parts), numbers, strict=True):
            if not 0 <= number < float("inf"):
                raise BuildError(f"{_option_name(name)} counts {number}; a count is a number from 0 on")
        self._own = [numbers[start : start + len(self.names)] for start in range(0, len(numbers), len(self.names))]

    def losses(self, labels: Sequence[Any], training: bool) -> list[MicroBatchLoss]:
        """Return the loss of each counted micro-batch. Collective over the replicas."""
        totals = torch.tensor(self._own, dtype=torch.float64).sum(0)
        dp = self._program.axis_size("dp")
        if dp > 1:
            totals = reduce_over_replicas(totals.to(self._device), self._program)
        parts = len(self._own) * dp
        weighted = [
            [count * parts / total if total else 0.0 for count, total in zip(counts, totals.tolist(), strict=True)]
            for counts in self._own
        ]
        return [
            _WeightedLoss(self, own, self._by_name(counts), self._by_name(weights), not self.is_checked(training))
            for own, counts, weights in zip(labels, self._own, weighted, strict=True)
        ]

    def _by_name(self, numbers: Sequence[float]) -> dict[str, float]:
        return dict(zip(self.names, numbers, strict=True))

    def is_checked(self, training: bool) -> bool:
        """Return True if the counts of the terms were checked in this mode."""
        return training in self._checked

    def record(self, name: str, count: float, labels: int) -> None:
        self._recorded.append((name, count, labels))

    def end(self, training: bool) -> None:
        """End a successful step. Collective if the terms were not checked yet.

        Raises:
            BuildError: on every rank: the counts of a term are not proportional to the labels of its mean.
        """
        if self.is_checked(training):
            return
        noted, self._recorded = [each for own in gather_objects(self._recorded, self._program.mesh) for each in own], []
        for name in self.names:
            _check_proportional(name, [(count, labels) for each, count, labels in noted if each == name and (count or labels)])
        self._checked.add(training)

    def _number(self, name: str, count: Count, part: Batch) -> torch.Tensor:
        found = self._of_argument(name, count, part) if isinstance(count, str) else _call_count(name, count, part)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found.detach().reshape(()).to(torch.float64)
        if isinstance(found, (int, float)):
            return torch.tensor(float(found), dtype=torch.float64)
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise BuildError(f"the function of {_option_name(name)} gives {what}; it has to give one number")

    def _of_argument(self, name: str, argument: str, part: Batch) -> torch.Tensor:
        value = tensors_of(part).get(argument)
        if value is None:
            raise BuildError(
                f"{_option_name(name)} is {argument!r}, which is not a tensor of the batch; it has "
                f"{', '.join(tensors_of(part)) or 'none'}"
            )
        if value.is_floating_point() or value.dtype is torch.bool:
            return value.sum(dtype=torch.float64)
        words = argument.lower()
        if any(word in words for word in _LABELS):
            return (value != self._ignored).sum()
        if any(word in words for word in _MASKS):
            return value.sum()
        if argument not in self._seen and bool(((value == 0) | (value == 1)).all()):
            raise BuildError(
                f"{_option_name(name)} is {argument!r}, whose integers are all 0 or 1: a mask, or labels of two classes; make "
                f"a mask bool, or give a function, e.g. lambda {argument.split('.')[0]}: ..."
            )
        self._seen.add(argument)
        return (value != self._ignored).sum()

    def terms_of(self, output: Any, labels: Any, is_tracked: bool) -> dict[str, torch.Tensor]:
        """Return the terms of a micro-batch's loss; raise ``BuildError`` if one is missing, no number, or without a count."""
        if self.names == [_WHOLE]:
            loss = self._loss_fn(output, labels) if self._loss_fn is not None else self._output_loss.of(output)
            return {_WHOLE: one_number(loss)}
        given = output if self._loss_fn is None else self._loss_fn(output, labels)
        whose = "the model's output" if self._loss_fn is None else "the result of loss_fn"
        fields = {} if isinstance(given, (tuple, list)) else fields_of(given) or getattr(given, "__dict__", {})
        for name in self.names:
            if not isinstance(fields.get(name), torch.Tensor) or fields[name].numel() != 1:
                raise BuildError(
                    f"loss_weights has the term {name!r}, and {whose}, which has {', '.join(map(str, fields)) or 'no fields'}, "
                    "has no such number; return the terms of the loss in a dict or dataclass"
                )
        further = {name: each for name, each in fields.items() if name not in self.names and name != "loss"}
        tensors = {name: each for name, each in further.items() if isinstance(each, torch.Tensor)}
        others = [name for name, each in tensors.items() if each.numel() == 1 and each.requires_grad]
        if others and self._loss_fn is not None:
            raise BuildError(
                f"{whose} has the term {others[0]!r}, which has no count in loss_weights; add it there, or detach it"
            )
        found = {name: fields[name].reshape(()) for name in self.names}
        if "loss" not in self.names and is_tracked:
            _check_sum(fields.get("loss"), found)
        return found


class _WeightedLoss(MicroBatchLoss):
    """Weighted sum of the terms of one micro-batch's loss."""

    def __init__(
        self, terms: LossTerms, labels: Any, counts: dict[str, float], weights: dict[str, float], is_tracked: bool
    ) -> None:
        self._terms, self._labels, self._counts, self._weights = terms, labels, counts, weights
        self._means = ReductionTracker() if is_tracked else None

    def run(self, stage: Callable[[], Any], index: int = 0) -> Any:
        """Run a stage; its losses are tracked until the counts are checked."""
        with self._mean_tracking():
            return stage()

    def loss(self, output: Any) -> torch.Tensor:
        """Return the weighted sum; a term with count 0, which may be NaN, counts as 0."""
        with self._mean_tracking():
            found = self._terms.terms_of(output, self._labels, self._means is not None)
        for name, term in found.items() if self._means is not None else ():
            if (labels := self._means.labels_of(term)) is not None:  # type: ignore[union-attr]
                self._terms.record(name, self._counts[name], labels)
        total: Any = 0
        for name, term in found.items():
            total = total + (term * self._weights[name] if self._counts[name] else _zero_term(term))
        return total  # type: ignore[no-any-return]

    def _mean_tracking(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._means is None else self._means


def _option_name(name: str) -> str:
    return f"loss_weights[{name!r}]" if name else "loss_weights"


def _call_count(name: str, count: Callable[..., Any], part: Batch) -> Any:
    """Call a count function with those arguments of a micro-batch that it names."""
    parameters = inspect.signature(count).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return count(**part)
    taken = [each for each in parameters if each.kind is not each.VAR_POSITIONAL]
    if missing := [each.name for each in taken if each.name not in part and each.default is each.empty]:
        raise BuildError(
            f"the function of {_option_name(name)} takes {missing[0]!r}, which is not in the batch; it has {', '.join(part)}"
        )
    found = {each.name: part[each.name] for each in taken if each.name in part}
    by_position = [found.pop(each.name) for each in taken if each.kind is each.POSITIONAL_ONLY and each.name in found]
    return count(*by_position, **found)


def _check_sum(loss: Any, terms: Mapping[str, torch.Tensor]) -> None:
    """Raise ``BuildError`` if there is a loss that is not the sum of its terms."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return
    whole, total = float(loss.detach()), sum(float(term.detach()) for term in terms.values())
    size = max(1.0, *(abs(float(term.detach())) for term in terms.values()))
    precision = max(torch.finfo(each.dtype).eps for each in (loss, *terms.values()))
    if abs(whole - total) > 20 * precision * size:  # False for NaN
        raise BuildError(
            f"the loss is {whole:.6g}, and its terms {', '.join(terms)} add up to {total:.6g}; return each term as it enters "
            "the loss, factors included, and name all of them in loss_weights"
        )


def _check_proportional(name: str, found: Sequence[tuple[float, int]]) -> None:
    """Raise ``BuildError`` if the counts of a term are not proportional to the labels of its mean."""
    for count, labels in found:
        if count * found[0][1] != labels * found[0][0]:
            raise BuildError(
                f"{_option_name(name)} counts {found[0][0]:g} and {count:g} in two micro-batches, but the "
                f"{'term' if name else 'loss'} is a mean over {found[0][1]} and {labels} labels there; give a function of the "
                "batch that counts these, of a next-token loss lambda labels: (labels[:, 1:] != -100).sum()"
            )


def _zero_term(term: torch.Tensor) -> torch.Tensor:
    """Return zero for a term with count 0; its gradients are zero, not NaN."""
    nodes = [term.grad_fn]
    for node in nodes:
        if node is not None:
            node.register_hook(_zero_gradients)
            if len(nodes) < _MAX_NODES:
                nodes += [before for before, _ in node.next_functions if before is not None and before not in nodes]
    return term.nan_to_num() * 0.0


_MAX_NODES = 50
"""Number of autograd nodes of a term that are searched for the division by its count."""


def _zero_gradients(given: Sequence[Any], received: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return zero gradients for a node that received zeros; it may have divided them by zero."""
    if any(each is not None and bool(each.any()) for each in received):
        return None
    return tuple(each if each is None else torch.zeros_like(each) for each in given)
