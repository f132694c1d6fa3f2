"""The check ``rows``: compares the loss of a micro-batch with the mean of its parts' losses, and finds the cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from slapo_core import BuildError, Program, gather_objects, get_logger

from ..batches.nested_tensors import fields_of
from ..losses.microbatch_loss import loss_of
from ..losses.reductions import LabelMean
from ..model.state_rollback import StateSnapshot
from ..options.common_options import CommonOptions
from . import row_mixing
from .diagnostics import Pair, Partition, buffers_are_updated, loss_is_no_mean, rows_are_mixed, term_is_no_mean, warn_or_refuse
from .row_subsets import Rows, dissimilar_pair, expected_losses, join_rows, narrow_rows, other_replicas
from .stage_runs import PlannedRows, Run, RunCache, RunFailedError, StageRuns, has_loss_of_its_own, runs_alone

T = TypeVar("T")
_FACTORS_AGREE = 1e-2
_SMALL_TERM = 0.1
"""Largest fraction of a loss that a balance loss may have; a larger term is the trained loss itself."""


class ComparedRuns(NamedTuple):
    """Results of runs of some rows and of their parts; ``pair`` are the losses that differ on some rank, or None."""

    whole: Run
    pair: Pair | None


class Factor(NamedTuple):
    """Factor of a term in a loss, as far as it is known; ``error`` is the bound of its rounding error."""

    value: float
    error: float

    def is_close(self, other: Factor) -> bool:
        """Return True if two factors are equal within their errors."""
        allowed = _FACTORS_AGREE * max(abs(self.value), abs(other.value)) + self.error + other.error
        return abs(self.value - other.value) <= allowed


class LossComparison:
    """Comparison of the loss of some rows with those of their parts. Every method is collective over the mesh.

    Args:
        plans: Plan of all rows, followed by plans of their parts.
        synced: BatchNorms with statistics of all rows of a batch.
        labels_differ: True if the engine refuses losses of unknown reduction, since numbers of labels differ.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        runs: StageRuns,
        state: StateSnapshot,
        plans: Sequence[PlannedRows],
        synced: Sequence[nn.Module],
        labels_differ: bool,
    ) -> None:
        self._program, self._options, self._runs, self._state = program, options, runs, state
        self._plans, self._synced, self._labels_differ = plans, synced, labels_differ
        self._tolerance = row_mixing.tolerance_of(runs.own_modules(plans[0]), options.precision)
        self._fixed = False
        self._written: list[dict[str, torch.Tensor]] = []
        self._outputs: list[Any] = []
        self._counted: list[LabelMean | None] = []
        self._pair: Pair | None = None

    @property
    def rows(self) -> int:
        return self._plans[0].rows.number

    def compare(self, known: RunCache | None, norms: Iterable[nn.Module] = (), doubted: bool = False) -> ComparedRuns:
        """Compare the loss of all rows with the mean of the losses of their parts.

        Args:
            norms: BatchNorms that use running statistics in these runs.
            doubted: True if other rows have differed; the tolerance is then smaller, as parts with similar losses differ less.
        """
        allowed = self._tolerance.repeated if doubted else self._tolerance.loss
        done: list[Run | None] = [None] * len(self._plans)
        if known is None or known.draws:
            self._fixed = True
        if known is not None and not self._synced:  # earlier runs used batch statistics
            done = [None if known.draws else known.whole, *known.parts]
        with row_mixing.by_running_statistics([*self._synced, *norms]):
            whole, *parts = [self._run(index) if run is None else run for index, run in enumerate(done)]
        self._written = [each.written for each in parts]
        self._outputs = [each.output for each in (whole, *parts)]
        self._counted = [each.counted for each in parts]
        pair = None
        # losses are not comparable if random numbers depend on the rows
        is_known = all(each.rng_fingerprint == whole.rng_fingerprint for each in parts)
        is_known = is_known and not (self._labels_differ and any(not isinstance(each.counted, LabelMean) for each in parts))
        losses = [each.loss for each in parts if each.loss is not None]
        if is_known and whole.loss is not None and len(losses) == len(parts):
            allowed = max(allowed, whole.rounding)  # a loss may have a lower precision than its model
            pair = self._differing_losses(whole.loss, losses, [each.counted for each in parts], allowed)
        self._pair = pair
        return ComparedRuns(whole, self.first(pair))

    def find_row_mixing(self, norms: Iterable[nn.Module]) -> str | None:
        """Return the path of the first module that mixes rows, with BatchNorms on running statistics."""
        events = []
        with row_mixing.by_running_statistics([*self._synced, *norms]):
            for index, planned in enumerate(self._plans):
                with row_mixing.events_of(self._runs.own_modules(planned)) as found:
                    self._run(index)
                events.append(found)
        rows = [planned.rows.number for planned in self._plans]
        with_loss = row_mixing.models_within(self._runs.own_modules(self._plans[0]))
        return self.first(row_mixing.first_mixing(events[0], events[1:], rows, self._tolerance.values, with_loss))

    def terms(self) -> dict[str, Pair]:
        """Return the losses beside the loss in the model's output that are not means of the parts' losses."""
        return {name: pair for each in gather_objects(self._own_terms(), self._program.mesh) for name, pair in each.items()}

    def factors(self) -> dict[str, Factor]:
        """Return the factor of each such loss, assumed to be a small term that alone explains the difference of the loss."""
        if self._pair is None:
            return self.first(None) or {}
        loss, mean = self._pair
        noise = self._tolerance.repeated * abs(loss)
        found = {}
        for name, (one, other) in self._own_terms().items():
            factor = Factor((loss - mean) / (one - other), noise / abs(one - other))
            if abs(factor.value * one) <= _SMALL_TERM * abs(loss):
                found[name] = factor
        return self.first(found) or {}

    def _own_terms(self) -> dict[str, Pair]:
        found: dict[str, Pair] = {}
        fields = [fields_of(each) or {} for each in self._outputs]
        for name in fields[0] if fields else ():
            values = [each.get(name) for each in fields]
            numbers = [float(each.detach()) for each in values if isinstance(each, torch.Tensor) and not each.dim()]
            if "loss" in str(name) and name != "loss" and len(numbers) == len(values):
                whole, *parts = numbers
                if (pair := self._differing_losses(whole, parts, self._counted, self._tolerance.repeated)) is not None:
                    found[name] = pair
        return found

    def differing_buffers(self) -> list[str]:
        """Return the names of buffers, except of norms, that got different values from different parts."""
        found = []
        for name in self._written[0] if self._written else ():
            one, other = self._written[0][name], self._written[-1].get(name)
            if other is not None and one.shape == other.shape and one.isfinite().all() and other.isfinite().all():
                size = max(one.abs().max().item(), other.abs().max().item()) if one.numel() else 0.0
                if size and (one - other).abs().max().item() > self._tolerance.values * size:
                    found.append(name)
        return sorted({name for names in gather_objects(found, self._program.mesh) for name in names})

    def loss_function(self, whole: Run) -> Pair | None:
        """Compare the loss function of all outputs with its mean over parts of the outputs, if outputs can be split."""
        loss_fn, pair, losses, start = self._options.loss_fn, None, [], 0
        rows = [planned.rows for planned in self._plans]
        if loss_fn is not None and whole.loss is not None:
            try:
                for part in rows[1:]:
                    output = narrow_rows(whole.output, rows[0].number, start, part.number)
                    with torch.no_grad():
                        losses.append(loss_of(output, loss_fn, part.labels).item())
                    start += part.number
                pair = self._differing_losses(whole.loss, losses, [None] * len(losses), self._tolerance.repeated)
            except Exception as err:  # outputs cannot be split
                get_logger().debug("the loss function was not run on some rows of the outputs: %s", err)
        return self.first(pair)

    def first(self, value: T | None) -> T | None:
        """Return the value of the first rank that has one."""
        return next((each for each in gather_objects(value, self._program.mesh) if each is not None), None)

    def _run(self, index: int) -> Run:
        return self._runs(self._plans[index], self._state, fixed=self._fixed)

    def _differing_losses(
        self, loss: float, losses: Sequence[float], counted: Sequence[LabelMean | None], tolerance: float
    ) -> Pair | None:
        """Return a loss and the nearest mean of its parts if they differ by more than rounding, or None."""
        rows = [planned.rows for planned in self._plans[1:]]
        expected = expected_losses(rows, losses, counted, self._options.ignored_label)
        if not expected or not math.isfinite(loss):
            return None
        means = [mean for mean in expected if math.isfinite(mean)]
        if not means:  # a hand-written mean over a part without labels is NaN
            return loss, expected[0]
        nearest = min(means, key=lambda mean: abs(mean - loss))
        allowed = tolerance * max(abs(loss), abs(nearest)) + 1e-7
        return (loss, nearest) if abs(nearest - loss) > allowed else None


class RowsCheck:
    """The check of one step's micro-batches, all of this rank. Collective over the mesh.

    ``reported`` are names in earlier warnings; it is updated.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        runs: StageRuns,
        parts: Sequence[Rows],
        labels_differ: bool,
        reported: set[str],
    ) -> None:
        self._program, self._options, self._runs, self._parts = program, options, runs, parts
        self._reported = reported
        self._labels_differ = labels_differ
        norms = row_mixing.batch_norms(program.module)
        # with one micro-batch, these use statistics of the whole batch
        self._synchronized = [each for each in norms.values() if len(parts) == 1 and row_mixing.over_replicas(each)]
        self._norms = {path: each for path, each in norms.items() if each not in self._synchronized}

    def run(self, halves: Sequence[Rows], known: RunCache | None) -> None:
        """Run the check; ``known`` has earlier runs of the micro-batch and its halves.

        Raises:
            BuildError: the loss is not a mean over rows; or, with ``strict=True``, modules mix rows.
        """
        pair, mixing, is_suspect, factors = None, list(self._norms), True, dict[str, Factor]()
        if not has_loss_of_its_own(self._options):
            try:
                plans = self._plan_rows(halves)
                with runs_alone(self._program, plans) as state:
                    comparison = self._comparison(plans, state)
                    pair, is_suspect = self._compare_losses(comparison, known)
                    factors = comparison.factors() if is_suspect else {}
                    self._report_buffers_and_terms(comparison.differing_buffers(), comparison.terms() if pair is None else {})
            except RunFailedError as err:
                get_logger().debug("the model does not run some rows of a micro-batch: %s", err)
            found = self._confirm(factors) if is_suspect else None
            mixing += [found[0]] if found is not None and found[0] not in self._norms else []
            pair = pair or (found[1] if found is not None else None)
        if mixing:
            self._report_mixing(mixing, pair)

    def _compare_losses(self, comparison: LossComparison, known: RunCache | None) -> tuple[Pair | None, bool]:
        """Return the losses that differ, and whether losses also differ if BatchNorms use running statistics."""
        pair = comparison.compare(known).pair
        if not self._norms:
            return pair, pair is not None
        return pair, comparison.compare(None, self._norms.values()).pair is not None

    def _confirm(self, factors: Mapping[str, Factor]) -> tuple[str, Pair] | None:
        """Compare the parts that the engine averages, micro-batches or those of two replicas: halves may break groups of rows.

        ``factors`` are terms that may explain the difference of halves.

        Returns:
            Path of a module that mixes rows, and the losses that differ; None if none differ.

        Raises:
            BuildError: the loss is not a mean over rows.
        """
        own, ignored = self._parts[0], self._options.ignored_label
        others = self._parts[1:] or other_replicas(own, self._program, self._runs.device, ignored)
        pair = dissimilar_pair(own, others, ignored)
        try:
            plans = self._plan_rows(pair)
            with runs_alone(self._program, plans) as state:
                comparison = self._comparison(plans, state)
                compared = comparison.compare(None, self._norms.values(), doubted=True)
                if compared.pair is None:
                    return None
                again = comparison.factors()
                terms = {name: pair for name, pair in comparison.terms().items() if name in again and name in factors}
                terms = {name: pair for name, pair in terms.items() if again[name].is_close(factors[name])}
                if terms:
                    self._report_buffers_and_terms([], terms)
                    return None
                mixing, wrong = comparison.find_row_mixing(self._norms.values()), comparison.loss_function(compared.whole)
                if wrong is None and mixing is not None:
                    return mixing, compared.pair
                raise BuildError(loss_is_no_mean(wrong or compared.pair, comparison.rows, self._cut))
        except RunFailedError as err:
            get_logger().debug("the first-step check 'rows' was left out: %s", err)
            return None

    def _plan_rows(self, parts: Sequence[Rows]) -> list[PlannedRows]:
        return [self._runs.plan_rows(each, has_backward=False) for each in (join_rows(parts), *parts)]

    def _comparison(self, plans: Sequence[PlannedRows], state: StateSnapshot) -> LossComparison:
        return LossComparison(self._program, self._options, self._runs, state, plans, self._synchronized, self._labels_differ)

    def _report_mixing(self, paths: Sequence[str], pair: Pair | None) -> None:
        """Warn of modules that mix rows; raise with ``strict=True``."""
        if self._reported.issuperset(paths):
            return
        self._reported.update(paths)
        self._report(rows_are_mixed(self._program.module, paths, pair, self._cut, self._norms.values()))

    def _report(self, text: str) -> None:
        warn_or_refuse(text, self._program, self._options.strict)

    def _report_buffers_and_terms(self, buffers: Sequence[str], terms: Mapping[str, Pair]) -> None:
        """Warn of buffers that micro-batches update and of terms of the loss; raise with ``strict=True``."""
        if not self._reported.issuperset(buffers):
            self._reported.update(buffers)
            self._report(buffers_are_updated(buffers, self._cut))
        for name in terms.keys() - self._reported:
            self._reported.add(name)
            self._report(term_is_no_mean(name, terms[name], self._cut))

    @property
    def _cut(self) -> Partition:
        return Partition(len(self._parts), self._program.axis_size("dp"))
