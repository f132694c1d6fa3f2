"""The check ``injected``: finds gradients of a backward from zero, and checks that they are means over rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from slapo_core import BuildError, Program, get_logger

from ..distributed._torch_private import has_custom_functions
from ..options.common_options import CommonOptions
from .diagnostics import IN_FP16, INNER_BACKWARD, Partition, injected_is_no_mean, warn_or_refuse
from .injected_gradients import InjectionProbe, is_mean_over_rows
from .row_mixing import tolerance_of
from .row_subsets import Rows, dissimilar_quarters, join_rows
from .stage_runs import AfterStage, PlannedRows, Run, RunCache, RunFailedError, StageRuns, runs_alone


class Part(NamedTuple):
    """Rows that run backward.

    Args:
        parts: Two parts that together are the rows; empty for one row.
        half: Index among the halves of the micro-batch; None if the rows are no half on some rank.
        injected: Probe of the gradients injected for the rows; of a deterministic run if the model samples random numbers.
    """

    planned: PlannedRows
    parts: Sequence[Rows]
    half: int | None = None
    injected: InjectionProbe | None = None


class InjectedCheck:
    """The check of one step. Every method is collective over the mesh.

    All rows of a micro-batch run forward, and half of them run backward, which costs twice as much. If none are found but the
    model has custom autograd functions, the other half runs backward too: injection may depend on the rows.
    """

    def __init__(self, program: Program, options: CommonOptions, runs: StageRuns) -> None:
        self._program, self._options, self._runs = program, options, runs
        self._is_hidden = False

    def run(self, whole: PlannedRows, halves: Sequence[Rows], cut: Partition | None) -> tuple[RunCache, bool] | None:
        """Return runs of the rows, and whether gradients are injected; None if the micro-batch does not run.

        ``cut`` is None if the micro-batch must not run in parts.

        Raises:
            BuildError: gradients are injected with fp16; or, with ``strict=True``, they are no mean over rows.
        """
        in_parts = cut is not None and halves[0].number > 1
        injected = self._injection_probe(whole)
        try:
            base, draws = self._run(whole, _runs_functions if in_parts else injected)
        except RunFailedError as err:
            get_logger().debug("whether the model injects gradients was not seen: %s", err)
            return None
        known = RunCache(base, [None] * len(halves), self._runs.any_rank(draws))
        if in_parts:
            found = self._find_part(whole, halves, known)
        else:
            self._is_hidden = injected.is_hidden
            found = Part(whole, halves, injected=None if known.draws else injected) if base.found else None
        if self._runs.any_rank(self._is_hidden):
            get_logger().info("%s", INNER_BACKWARD)
        if found is not None and self._options.precision == "fp16":
            raise BuildError(IN_FP16)
        if found is not None and cut is not None:
            self._compare(found, whole, cut, known)
            self._run_remaining_halves(halves, known)
        return known, found is not None

    def _find_part(self, whole: PlannedRows, halves: Sequence[Rows], known: RunCache) -> Part | None:
        """Return rows of a micro-batch for which gradients are injected, or None."""
        try:
            found = self._find_part_of_halves(halves, known)
            return Part(whole, halves) if found is not None and not found.parts else found
        except RunFailedError as err:
            get_logger().debug("the model does not run some rows of a micro-batch: %s", err)
        try:
            return self._find_injection(Part(whole, halves), known)
        except RunFailedError as err:
            get_logger().debug("whether the model injects gradients was not seen: %s", err)
            return None

    def _find_part_of_halves(self, halves: Sequence[Rows], known: RunCache) -> Part | None:
        quarters, is_half = dissimilar_quarters(halves, self._options.ignored_label)
        half = None if self._runs.any_rank(not is_half) else 0
        rows = join_rows(quarters) if half is None else halves[0]
        found = self._find_injection(Part(self._runs.plan_rows(rows), quarters, half), known)
        if found is not None or not known.whole.found:
            return found
        for index, each in enumerate(halves):
            if index != half:
                parts = dissimilar_quarters([each], self._options.ignored_label)[0] if each.number > 1 else []
                found = self._find_injection(Part(self._runs.plan_rows(each), parts, index), known, fixed=known.draws)
                if found is not None:
                    return found
        return None

    def _find_injection(self, part: Part, known: RunCache, fixed: bool = False) -> Part | None:
        """Run rows backward from zero; return them if gradients are injected."""
        found, injected = self._backward(part, known, fixed)
        return part._replace(injected=injected if fixed == known.draws else None) if found else None

    def _backward(self, part: Part, known: RunCache, fixed: bool) -> tuple[bool, InjectionProbe]:
        """Run rows backward from zero; return whether gradients are injected on any rank, and this rank's probe."""
        injected = self._injection_probe(part.planned)
        run, _ = self._run(part.planned, injected, fixed)
        self._is_hidden = self._is_hidden or injected.is_hidden
        if part.half is not None and fixed == known.draws:
            known.parts[part.half] = run
        return run.found, injected

    def _compare(self, found: Part, whole: PlannedRows, cut: Partition, known: RunCache) -> None:
        """Warn if the gradients injected for some rows are not the mean of those for their parts.

        Raises:
            BuildError: instead of the warning, with ``strict=True``.
        """
        number, others = found.planned.rows.number, list[InjectionProbe]()
        try:
            one = found.injected or self._backward(found, known, known.draws)[1]
            for index, rows in enumerate(found.parts):
                part = Part(self._runs.plan_rows(rows), (), index if found.planned is whole else None)
                others.append(self._backward(part, known, known.draws)[1])
        except RunFailedError as err:
            get_logger().debug("whether injected gradients are means over rows was not seen: %s", err)
            return
        weights = [each.number / number for each in found.parts]
        tolerance = 10 * tolerance_of(self._runs.own_modules(whole), self._options.precision).values
        if self._runs.any_rank(not is_mean_over_rows(one, others, weights, tolerance)):
            warn_or_refuse(injected_is_no_mean(cut), self._program, self._options.strict)

    def _run_remaining_halves(self, halves: Sequence[Rows], known: RunCache) -> None:
        """Run the halves that have not run, with a graph, which may show the reduction of the loss."""
        if known.draws:
            return
        try:
            for index, rows in enumerate(halves):
                if known.parts[index] is None:
                    known.parts[index] = self._run(self._runs.plan_rows(rows), _runs_functions)[0]
        except RunFailedError as err:
            get_logger().debug("the model does not run some rows of a micro-batch: %s", err)

    def _run(self, planned: PlannedRows, after_stage: AfterStage, fixed: bool = False) -> tuple[Run, bool]:
        """Run rows; return the run, and whether this rank used random numbers."""
        with runs_alone(self._program, [planned]) as state:
            run = self._runs(planned, state, after_stage=after_stage, fixed=fixed)
            return run, run.rng_fingerprint != state.start

    def _injection_probe(self, planned: PlannedRows) -> InjectionProbe:
        parameters = [parameter for module in self._runs.own_modules(planned) for parameter in module.parameters()]
        return InjectionProbe([each for each in parameters if each.requires_grad], self._runs.accumulates)


def _runs_functions(received: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> bool:
    """Return True if the backward of a stage has custom autograd functions."""
    return has_custom_functions(given)
