"""The check ``rows``: compares the loss of a micro-batch with the mean of its parts' losses, and finds the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slapo_core import BuildError, Program, get_logger

from ..model.state_rollback import StateSnapshot
from ..options.common_options import CommonOptions
from . import row_mixing
from .diagnostics import Pair, Partition, buffers_are_updated, loss_is_no_mean, rows_are_mixed, term_is_no_mean, warn_or_refuse
from .loss_comparison import Factor, LossComparison
from .row_subsets import Rows, dissimilar_pair, join_rows, other_replicas
from .stage_runs import PlannedRows, RunCache, RunFailedError, StageRuns, has_loss_of_its_own, runs_alone


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
            BuildError: the loss is no mean over rows; or, with ``strict=True``, modules mix rows.
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
            BuildError: the loss is no mean over rows.
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
        self._report(rows_are_mixed(self._program.module, paths, pair, self._cut, bool(self._norms)))

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
