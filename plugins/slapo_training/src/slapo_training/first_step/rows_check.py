"""The check ``rows``: compares the loss of a micro-batch with the mean of its parts' losses, and finds the cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from slapo_core.agreement import gather
from slapo_core.errors import BuildError
from slapo_core.logger import get_logger
from slapo_core.program import Program

from ..losses import loss_of
from ..means import Counted
from ..options import CommonOptions
from ..state_rollback import StateSnapshot
from ..structures import fields_of
from . import row_mixing
from .findings import Cut, Pair, buffers_are_updated, loss_is_no_mean, rows_are_mixed, term_is_no_mean
from .row_parts import Rows, dissimilar_pair, expected_losses, joined, narrowed, other_replicas
from .stage_runs import KnownRuns, Planned, Run, RunFailedError, StageRuns, has_loss_of_its_own, runs_alone

T = TypeVar("T")
_FACTORS_AGREE = 1e-2
_SMALL_TERM = 0.1
"""Share of a loss up to which a term with the statistics of a batch is taken for a balance loss; more is what is trained."""


class Compared(NamedTuple):
    """Results of runs of some rows and of their parts.

    Args:
        whole: The run of all rows.
        pair: The losses that differ on some rank, or None.
    """

    whole: Run
    pair: Pair | None


class Factor(NamedTuple):
    """Factor of a term in a loss, as far as it is known.

    Args:
        value: The factor.
        error: What rounding may have added to it.
    """

    value: float
    error: float

    def agrees(self, other: Factor) -> bool:
        """Return whether two may be of one term with a fixed factor."""
        allowed = _FACTORS_AGREE * max(abs(self.value), abs(other.value)) + self.error + other.error
        return abs(self.value - other.value) <= allowed


class Trial:
    """Runs of some rows and of their parts. Every method is collective over the mesh.

    Args:
        program: The program that runs.
        options: Options of the engine.
        runs: Runs the stages.
        state: State that each run starts from.
        plans: All rows, and then their parts.
        synced: BatchNorms that take the statistics of all rows of a batch.
        labels_differ: Whether the engine refuses losses of unknown reduction, as numbers of labels differ.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        runs: StageRuns,
        state: StateSnapshot,
        plans: Sequence[Planned],
        synced: Sequence[nn.Module],
        labels_differ: bool,
    ) -> None:
        self._program, self._options, self._runs, self._state = program, options, runs, state
        self._plans, self._synced, self._labels_differ = plans, synced, labels_differ
        own = self._own_modules(0)
        self._tolerance = row_mixing.tolerance_of(own, options.precision)
        self._fixed = False
        self._written: list[dict[str, torch.Tensor]] = []
        self._outputs: list[Any] = []
        self._counted: list[Counted | None] = []
        self._pair: Pair | None = None

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self._plans[0].rows.number

    def compare(
        self,
        known: KnownRuns | None,
        norms: Iterable[nn.Module] = (),
        doubted: bool = False,
    ) -> Compared:
        """Compare the loss of all rows with the mean of the losses of their parts.

        Args:
            known: Runs of these rows, where there were any.
            norms: BatchNorms that are to use their running statistics.
            doubted: Whether other rows have differed already: a root, say, differs less where parts have similar losses.
        """
        allowed = self._tolerance.repeated if doubted else self._tolerance.loss
        done: list[Run | None] = [None] * len(self._plans)
        if known is None or known.draws:
            self._fixed = True
        if known is not None and not self._synced:  # else as no run before
            done = [None if known.draws else known.whole, *known.parts]
        with row_mixing.by_running_statistics([*self._synced, *norms]):
            whole, *parts = [self._run(index) if run is None else run for index, run in enumerate(done)]
        self._written = [each.written for each in parts]
        self._outputs = [each.output for each in (whole, *parts)]
        self._counted = [each.counted for each in parts]
        pair = None
        # a model that draws other numbers for other rows gives no losses to compare
        is_known = all(each.position == whole.position for each in parts)
        is_known = is_known and not (self._labels_differ and any(not isinstance(each.counted, Counted) for each in parts))
        losses = [each.loss for each in parts if each.loss is not None]
        if is_known and whole.loss is not None and len(losses) == len(parts):
            pair = self._differing(whole.loss, losses, [each.counted for each in parts], allowed)
        self._pair = pair
        return Compared(whole, self.first(pair))

    def mixing(self, norms: Iterable[nn.Module]) -> str | None:
        """Return the path of the first module that mixes rows, beside BatchNorms that use their running statistics."""
        events = []
        with row_mixing.by_running_statistics([*self._synced, *norms]):
            for index in range(len(self._plans)):
                with row_mixing.events_of(self._own_modules(index)) as found:
                    self._run(index)
                events.append(found)
        rows = [planned.rows.number for planned in self._plans]
        with_loss = row_mixing.models_within(self._own_modules(0))
        return self.first(row_mixing.first_mixing(events[0], events[1:], rows, self._tolerance.values, with_loss))

    def terms(self) -> dict[str, Pair]:
        """Return losses beside the loss in the model's output that are no means of those of the parts."""
        return {name: pair for each in gather(self._own_terms(), self._program.mesh) for name, pair in each.items()}

    def factors(self) -> dict[str, Factor]:
        """Return the factor that each of these losses would have in the loss, were it a small term and all that is no mean."""
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
                if (pair := self._differing(whole, parts, self._counted, self._tolerance.repeated)) is not None:
                    found[name] = pair
        return found

    def updated(self) -> list[str]:
        """Return the names of buffers that the parts' forwards have given other numbers, beside those of norms."""
        found = []
        for name in self._written[0] if self._written else ():
            one, other = self._written[0][name], self._written[-1].get(name)
            if other is not None and one.shape == other.shape and one.isfinite().all() and other.isfinite().all():
                size = max(one.abs().max().item(), other.abs().max().item()) if one.numel() else 0.0
                if size and (one - other).abs().max().item() > self._tolerance.values * size:
                    found.append(name)
        return sorted({name for names in gather(found, self._program.mesh) for name in names})

    def loss_function(self, whole: Run) -> Pair | None:
        """Compare the loss function on all outputs with its mean over those of some rows, where outputs can be cut."""
        loss_fn, pair, losses, start = self._options.loss_fn, None, [], 0
        rows = [planned.rows for planned in self._plans]
        if loss_fn is not None and whole.loss is not None:
            try:
                for part in rows[1:]:
                    output = narrowed(whole.output, rows[0].number, start, part.number)
                    with torch.no_grad():
                        losses.append(loss_of(output, loss_fn, part.labels).item())
                    start += part.number
                pair = self._differing(whole.loss, losses, [None] * len(losses), self._tolerance.repeated)
            except Exception as err:  # of what cannot be cut
                get_logger().debug("the loss function was not run on some rows of the outputs: %s", err)
        return self.first(pair)

    def first(self, value: T | None) -> T | None:
        """Return the value of the first rank that has one."""
        return next((each for each in gather(value, self._program.mesh) if each is not None), None)

    def _run(self, index: int) -> Run:
        return self._runs(self._plans[index], self._state, fixed=self._fixed)

    def _differing(
        self, loss: float, losses: Sequence[float], counted: Sequence[Counted | None], tolerance: float
    ) -> Pair | None:
        """Return a loss and the nearest mean of its parts, where these differ by more than rounding."""
        rows = [planned.rows for planned in self._plans[1:]]
        expected = expected_losses(rows, losses, counted, self._options.ignored_label)
        if not expected or not math.isfinite(loss):
            return None
        means = [mean for mean in expected if math.isfinite(mean)]
        if not means:  # a part with nothing that counts, which a mean by hand divides by zero
            return loss, expected[0]
        nearest = min(means, key=lambda mean: abs(mean - loss))
        allowed = tolerance * max(abs(loss), abs(nearest)) + 1e-7
        return (loss, nearest) if abs(nearest - loss) > allowed else None

    def _own_modules(self, index: int) -> list[nn.Module]:
        own, stages = self._program.axis_rank("pp"), self._plans[index].program.stages
        return [stage.module for stage in stages if self._program.rank_of(stage.index) == own]


class RowsCheck:
    """The check of one step's micro-batches. Collective over the mesh.

    Args:
        program: The program that runs.
        options: Options of the engine.
        runs: Runs the stages.
        parts: All micro-batches of this rank.
        labels_differ: See ``Trial``.
        told: Paths of modules that were told of before; filled.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        runs: StageRuns,
        parts: Sequence[Rows],
        labels_differ: bool,
        told: set[str],
    ) -> None:
        self._program, self._options, self._runs, self._parts = program, options, runs, parts
        self._told = told
        self._labels_differ = labels_differ
        norms = row_mixing.batch_norms(program.module)
        # with one micro-batch these take statistics of the whole batch
        self._synced = [each for each in norms.values() if len(parts) == 1 and row_mixing.over_replicas(each)]
        self._norms = {path: each for path, each in norms.items() if each not in self._synced}

    def make(self, halves: Sequence[Rows], known: KnownRuns | None) -> None:
        """Make the check.

        Args:
            halves: Two, that are a micro-batch together.
            known: Runs of both together and of each, where there were any.

        Raises:
            BuildError: the loss is no mean over rows; or, with ``strict=True``, modules mix rows.
        """
        pair, mixing, is_suspect, factors = None, list(self._norms), True, dict[str, Factor]()
        if self._is_loss_of_rows:
            try:
                plans = self._planned(halves)
                with runs_alone(self._program, plans) as state:
                    trial = self._trial(plans, state)
                    pair, is_suspect = self._look(trial, known)
                    factors = trial.factors() if is_suspect else {}
                    self._say_beside(trial.updated(), trial.terms() if pair is None else {})
            except RunFailedError as err:
                get_logger().debug("the model does not run some rows of a micro-batch: %s", err)
            found = self._confirmed(factors) if is_suspect else None
            mixing += [found[0]] if found is not None and found[0] not in self._norms else []
            pair = pair or (found[1] if found is not None else None)
        if mixing:
            self._say(mixing, pair)

    @property
    def _is_loss_of_rows(self) -> bool:
        """Return whether the engine takes the loss for a mean over rows, or over the labels in them."""
        return not has_loss_of_its_own(self._options)

    def _look(self, trial: Trial, known: KnownRuns | None) -> tuple[Pair | None, bool]:
        """Return the losses that differ with BatchNorms as they are, and whether they also differ without their statistics."""
        pair = trial.compare(known).pair
        if not self._norms:
            return pair, pair is not None
        return pair, trial.compare(None, self._norms.values()).pair is not None

    def _confirmed(self, factors: Mapping[str, Factor]) -> tuple[str, Pair] | None:
        """Compare the parts that the engine averages, micro-batches or those of two replicas: rows may go in groups.

        Args:
            factors: Terms that may be what made halves differ, and by which factor.

        Returns:
            The path of a module that mixes rows, and the losses that differ; None where none do.

        Raises:
            BuildError: the loss is no mean over rows.
        """
        own, ignored = self._parts[0], self._options.ignored_label
        others = self._parts[1:] or other_replicas(own, self._program, self._runs.device, ignored)
        pair = dissimilar_pair(own, others, ignored)
        try:
            plans = self._planned(pair)
            with runs_alone(self._program, plans) as state:
                trial = self._trial(plans, state)
                compared = trial.compare(None, self._norms.values(), doubted=True)
                if compared.pair is None:
                    return None
                again = trial.factors()
                terms = {name: pair for name, pair in trial.terms().items() if name in again and name in factors}
                terms = {name: pair for name, pair in terms.items() if again[name].agrees(factors[name])}
                if terms:
                    self._say_beside([], terms)
                    return None
                mixing, wrong = trial.mixing(self._norms.values()), trial.loss_function(compared.whole)
                if wrong is None and mixing is not None:
                    return mixing, compared.pair
                raise BuildError(loss_is_no_mean(wrong or compared.pair, trial.rows, self._cut))
        except RunFailedError as err:
            get_logger().debug("the first-step check 'rows' was left out: %s", err)
            return None

    def _planned(self, parts: Sequence[Rows]) -> list[Planned]:
        return [self._runs.planned(each) for each in (joined(parts), *parts)]

    def _trial(self, plans: Sequence[Planned], state: StateSnapshot) -> Trial:
        return Trial(self._program, self._options, self._runs, state, plans, self._synced, self._labels_differ)

    def _say(self, paths: Sequence[str], pair: Pair | None) -> None:
        """Warn of modules that mix rows, or refuse them where that is asked for."""
        if self._told.issuperset(paths):
            return
        self._told.update(paths)
        self._tell(rows_are_mixed(self._program.module, paths, pair, self._cut, bool(self._norms)))

    def _tell(self, text: str) -> None:
        if self._options.strict:
            raise BuildError(text)
        if not any(self._program.axis_rank(axis) for axis in ("pp", "dp", "tp")):
            get_logger().warning("%s", text)

    def _say_beside(self, buffers: Sequence[str], terms: Mapping[str, Pair]) -> None:
        """Warn of buffers that each micro-batch updates and of terms of the loss, or refuse them where that is asked for."""
        if not self._told.issuperset(buffers):
            self._told.update(buffers)
            self._tell(buffers_are_updated(buffers, self._cut))
        for name in terms.keys() - self._told:
            self._told.add(name)
            self._tell(term_is_no_mean(name, terms[name], self._cut))

    @property
    def _cut(self) -> Cut:
        return Cut(len(self._parts), self._program.axis_size("dp"))
