"""The check ``injected``: finds gradients that a backward from zero gives, and checks that they are means over rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slapo_core.errors import BuildError
from slapo_core.logger import get_logger
from slapo_core.program import Program

from ..options import CommonOptions
from .findings import IN_FP16, INNER_BACKWARD, Cut, injected_is_no_mean
from .injected import Injected, is_mean_over_rows
from .row_mixing import tolerance_of
from .row_parts import Rows
from .stage_runs import Planned, Run, RunFailedError, StageRuns, runs_alone


class InjectedCheck:
    """The check of one step. Every method is collective over the mesh.

    Args:
        program: The program that runs.
        options: Options of the engine.
        runs: Runs the stages.
    """

    def __init__(self, program: Program, options: CommonOptions, runs: StageRuns) -> None:
        self._program, self._options, self._runs = program, options, runs
        self._is_random = False
        self._whole: Injected | None = None

    def make(self, whole: Planned) -> Run | None:
        """Return the run of a micro-batch, which says whether gradients are injected; None where it failed.

        Raises:
            BuildError: they are, with fp16.
        """
        injected = self._injected(whole)
        try:
            with runs_alone(self._program, [whole]) as state:
                run = self._runs(whole, state, behind=injected)
        except RunFailedError as err:
            get_logger().debug("whether the model injects gradients was not seen: %s", err)
            return None
        if self._runs.anywhere(injected.is_unseen):
            get_logger().info("%s", INNER_BACKWARD)
        if run.found and self._options.precision == "fp16":
            raise BuildError(IN_FP16)
        self._is_random = self._runs.anywhere(run.position != state.start)
        self._whole = None if self._is_random else injected
        return run

    def look_at_rows(self, whole: Planned, halves: Sequence[Rows], cut: Cut) -> list[Run] | None:
        """Warn where the gradients injected for a micro-batch are not the mean of those for its halves.

        Returns:
            The runs of the halves; None where the model draws random numbers.

        Raises:
            BuildError: so with ``strict=True``.
        """
        try:
            plans = [whole, *(self._runs.planned(each) for each in halves)]
            found = [self._whole or self._injected(whole), *(self._injected(each) for each in plans[1:])]
            skipped = 0 if self._whole is None else 1
            with runs_alone(self._program, plans) as state:
                runs = [
                    self._runs(planned, state, behind=injected, fixed=self._is_random)
                    for planned, injected in list(zip(plans, found, strict=True))[skipped:]
                ]
        except RunFailedError as err:
            get_logger().debug("whether injected gradients are means over rows was not seen: %s", err)
            return None
        weights = [each.number / whole.rows.number for each in halves]
        tolerance = 10 * tolerance_of(self._modules(whole), self._options.precision).values
        if self._runs.anywhere(not is_mean_over_rows(found[0], found[1:], weights, tolerance)):
            text = injected_is_no_mean(cut)
            if self._options.strict:
                raise BuildError(text)
            self._say(text)
        return None if self._is_random else runs

    def _injected(self, planned: Planned) -> Injected:
        parameters = [parameter for module in self._modules(planned) for parameter in module.parameters()]
        return Injected([each for each in parameters if each.requires_grad], self._runs.accumulates)

    def _modules(self, planned: Planned) -> list[nn.Module]:
        own = self._program.axis_rank("pp")
        return [each.module for each in planned.program.stages if self._program.rank_of(each.index) == own]

    def _say(self, text: str) -> None:
        if not any(self._program.axis_rank(axis) for axis in ("pp", "dp", "tp")):
            get_logger().warning("%s", text)
