"""The check of rows: is the loss of a micro-batch the mean of the losses of its parts, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from torch import nn

from slapo_core.agreement import gather
from slapo_core.errors import BuildError
from slapo_core.logger import get_logger
from slapo_core.program import Program

from ..losses import loss_of
from ..options import CommonOptions
from . import row_mixing
from .findings import Cut, Pair, loss_is_no_mean, rows_are_mixed
from .left_alone import RandomNumbers
from .row_parts import expected_losses, narrowed
from .stage_runs import Planned, Run, StageRuns

T = TypeVar("T")


class Compared(NamedTuple):
    """Some rows and their parts, run.

    Args:
        whole: The run of all rows.
        pair: What differs on this rank, if anything.
        differs: Whether something differs on any rank.
    """

    whole: Run
    pair: Pair | None
    differs: bool


class RowsCheck:
    """Compares a micro-batch with its parts. Collective over the mesh.

    Args:
        program: What runs.
        options: Of the engine.
        runs: Run the stages.
        numbers: Where random numbers start.
        plans: All rows, and then their parts.
        num_parts: Micro-batches of a replica.
    """

    def __init__(
        self,
        program: Program,
        options: CommonOptions,
        runs: StageRuns,
        numbers: RandomNumbers,
        plans: Sequence[Planned],
        num_parts: int,
    ) -> None:
        self._program, self._options, self._runs, self._numbers = program, options, runs, numbers
        self._plans, self._num_parts = plans, num_parts
        own = [stage.module for stage in plans[0].program.stages if program.rank_of(stage.index) == program.axis_rank("pp")]
        self._tolerance = row_mixing.tolerance_of(own, options.precision)
        norms = row_mixing.batch_norms(program.module)
        # with one micro-batch these take statistics of the whole batch
        self._whole = [each for each in norms.values() if num_parts == 1 and row_mixing.over_replicas(each)]
        self._norms = {path: each for path, each in norms.items() if each not in self._whole}
        self._fixed = False

    def make(self, base: Run | None) -> None:
        """Make the check.

        Args:
            base: A run of all rows, where there was one.

        Raises:
            BuildError: see ``FirstStep.check``.
            RunFailedError: some rows could not be run.
        """
        mixing = list(self._norms)
        pair: Pair | None = None
        if self._is_loss_of_rows:
            pair, found = self._judged(base)
            mixing += found
        if mixing:
            self._say(mixing, pair)

    @property
    def _is_loss_of_rows(self) -> bool:
        """Return whether the engine takes the loss for a mean over rows, or over the labels in them."""
        given = (getattr(self._options, name, None) for name in ("loss_over", "loss_weights"))
        return all(each is None for each in given)

    def _judged(self, base: Run | None) -> tuple[Pair | None, list[str]]:
        """Return what differs, and the modules beside BatchNorms that mix rows.

        Raises:
            BuildError: the loss is no mean over rows.
        """
        start = self._numbers.position()
        if base is None or self._runs.anywhere(base.position != start):
            base, self._fixed = None, True
        compared = self._compare(base)
        if not compared.differs:
            return None, []
        pair = self._first(compared.pair)
        if self._norms:
            compared = self._compare(None, self._norms.values())
            if not compared.differs:
                return pair, []
        mixing = self._first(self._mixing())
        wrong = self._first(self._pair_of_loss_function(compared.whole))
        if wrong is None and mixing is None:
            wrong = self._first(compared.pair)
        if wrong is not None:
            raise BuildError(self._no_mean(wrong))
        return pair, [mixing] if mixing is not None and mixing not in self._norms else []

    def _compare(self, base: Run | None, frozen: Iterable[nn.Module] = ()) -> Compared:
        """Run all rows and their parts."""
        with row_mixing.by_running_statistics([*self._whole, *frozen]):
            whole = base or self._run(0)
            parts = [self._run(index) for index in range(1, len(self._plans))]
        pair = None
        # a model that draws other numbers for other rows gives no losses to compare
        is_same_draw = all(each.position == whole.position for each in parts)
        losses = [each.loss for each in parts if each.loss is not None]
        if is_same_draw and whole.loss is not None and len(losses) == len(parts):
            rows = [planned.rows for planned in self._plans[1:]]
            means = expected_losses(rows, losses, [each.counted for each in parts], self._options.ignored_label)
            pair = self._differing(whole.loss, means)
        return Compared(whole, pair, self._runs.anywhere(pair is not None))

    def _run(self, index: int) -> Run:
        return self._runs(self._plans[index], self._numbers, fixed=self._fixed)

    def _differing(self, loss: float, means: Sequence[float]) -> Pair | None:
        """Return a loss and the nearest mean of its parts, where these differ by more than rounding."""
        if not means or any(not math.isfinite(each) for each in (loss, *means)):
            return None
        nearest = min(means, key=lambda mean: abs(mean - loss))
        allowed = self._tolerance.loss * max(abs(loss), abs(nearest)) + 1e-7
        return (loss, nearest) if abs(nearest - loss) > allowed else None

    def _pair_of_loss_function(self, whole: Run) -> Pair | None:
        """Compare what the loss function gives for all outputs, and for those of some rows; where outputs can be cut."""
        loss_fn, rows = self._options.loss_fn, [planned.rows for planned in self._plans]
        if loss_fn is None or whole.loss is None:
            return None
        losses, counted, start = [], [], 0
        try:
            for part in rows[1:]:
                output = narrowed(whole.output, rows[0].number, start, part.number)
                losses.append(float(loss_of(output, loss_fn, part.labels)))
                start += part.number
        except Exception:  # of what cannot be cut
            return None
        counted = [None] * len(losses)
        means = expected_losses(rows[1:], losses, counted, self._options.ignored_label)
        return self._differing(whole.loss, means)

    def _mixing(self) -> str | None:
        """Return the path of the first module of this rank that mixes rows."""
        own = [
            [stage.module for stage in planned.program.stages if self._program.rank_of(stage.index) == self._own]
            for planned in self._plans[:2]
        ]
        events = []
        with row_mixing.by_running_statistics([*self._whole, *self._norms.values()]):
            for index, modules in enumerate(own):
                with row_mixing.events_of(modules) as found:
                    self._run(index)
                events.append(found)
        rows = self._plans[0].rows.number, self._plans[1].rows.number
        return row_mixing.first_mixing(*events, rows, self._tolerance.values)

    @property
    def _own(self) -> int:
        return self._program.axis_rank("pp")

    def _first(self, value: T | None) -> T | None:
        """Return the value of the first rank that has one. Collective."""
        return next((each for each in gather(value, self._program.mesh) if each is not None), None)

    def _say(self, paths: Sequence[str], pair: Pair | None) -> None:
        """Warn of modules that mix rows, or refuse them where that is asked for."""
        text = rows_are_mixed(self._program.module, paths, pair, self._cut, bool(self._norms))
        if self._options.strict:
            raise BuildError(text)
        if not any(self._program.axis_rank(axis) for axis in ("pp", "dp", "tp")):
            get_logger().warning("%s", text)

    def _no_mean(self, pair: Pair) -> str:
        return loss_is_no_mean(pair, self._plans[0].rows.number, self._cut)

    @property
    def _cut(self) -> Cut:
        return Cut(self._num_parts, self._program.axis_size("dp"))
