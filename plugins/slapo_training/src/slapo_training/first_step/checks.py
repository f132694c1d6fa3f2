"""The first-step checks of one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import Program, get_logger

from ..batches.microbatches import Batch, labels_of
from ..distributed.ranks import all_reduce, reduce_over_replicas
from ..losses.reductions import LabelMean
from ..model.state_rollback import TrainingMode
from ..options.check_switches import CHECKS, disabled_checks, log_disabled_checks
from ..options.common_options import CommonOptions
from .diagnostics import Partition, is_first_rank
from .injected_check import InjectedCheck
from .row_subsets import Rows, UnevenRowCounts, dissimilar_halves, join_rows, other_replicas
from .rows_check import RowsCheck
from .stage_runs import Around, RunFailedError, StageRuns, has_loss_of_its_own

_UNKNOWN = -1


class LabelCounts:
    """Counts the labels of batches, after one loss has shown which labels count. Made collectively.

    ``counted`` is the reduction of the loss of the micro-batch ``rows``, on ranks that know it.
    """

    def __init__(self, program: Program, ignored: int, rows: Rows, counted: LabelMean | None, device: torch.device) -> None:
        self._program = program
        counted = counted if isinstance(counted, LabelMean) else None
        self._ignored = ignored if counted is None else counted.ignore_index
        own = labels_of([rows.as_dict()], self._ignored)[0]
        labels = _UNKNOWN if counted is None else counted.labels
        is_other = [int(labels not in (_UNKNOWN, number)) for number in own]
        row = torch.tensor([labels, *is_other, self._ignored if counted is not None else -(2**40)], device=device)
        found, *others, ignored = all_reduce(row, program.mesh, dist.ReduceOp.MAX).tolist()
        self._ignored = self._ignored if ignored == -(2**40) else int(ignored)
        self._kind = others.index(0) if 0 in others else None
        self._found = float(found)

    def mean(self, parts: Sequence[Rows], device: torch.device) -> float | None:
        """Return the mean number of labels of a micro-batch over all replicas; None without a known mean. Collective."""
        if self._found <= 0:
            return None
        if self._kind is None:
            return self._found
        counts = labels_of([part.as_dict() for part in parts], self._ignored)
        total = torch.tensor(sum(each[self._kind] for each in counts), device=device)
        return reduce_over_replicas(total, self._program).item() / (len(parts) * self._program.axis_size("dp"))


class FirstStep:
    """Checks the micro-batches of the first step that splits a batch, before they are trained.

    A later step is checked when labels, masks or padding differ for the first time, which shows hand-written means over these.

    Attributes:
        injects: True if the model injects gradients into its backward.
        is_uneven: True if fingerprints of ``marks`` differ in this step; the engine sets it, the same on all ranks.
    """

    def __init__(self, program: Program, options: CommonOptions) -> None:
        self._program, self._options, self._modes = program, options, TrainingMode(program.module)
        self._off = [name for name in disabled_checks(options.check) if name in CHECKS]
        options.batch_rows.learn_tokens(program.module)
        self._is_done = False
        self.injects = self.is_uneven = False
        self._marks = UnevenRowCounts(program, options.ignored_label)
        self._warned: set[str] = set()
        self._labels: LabelCounts | None = None

    def scale(self, num_parts: int) -> float:
        """Return the factor of losses' gradients, by which gradients of parameters are divided later."""
        return float(num_parts) if self.injects else 1.0

    def mean_labels(self, parts: Sequence[Batch], labels: Sequence[Any], device: torch.device) -> float | None:
        """Return the average number of labels of a micro-batch over all replicas. Collective.

        Returns None if the loss is not a known mean over labels. Models that inject gradients need the number, as their losses
        are weighted before the batch runs.
        """
        rows = [Rows(*each, self._options.batch_rows) for each in zip(parts, labels, strict=True)]
        return None if self._labels is None else self._labels.mean(rows, device)

    def marks(self, parts: Sequence[Batch], training: bool = True) -> list[int]:
        """Return a fingerprint of each micro-batch's row counts, with no message to other ranks.

        The engine compares the fingerprints of all ranks and sets ``is_uneven``.
        """
        if not training or "rows" in self._off or not self._is_cut(len(parts)) or has_loss_of_its_own(self._options):
            return [0]
        return self._marks.fingerprints([self._options.batch_rows.without_variable_sizes(part) for part in parts])

    def is_due(self, num_parts: int) -> bool:
        """Return True if this step must be checked; the same on all ranks."""
        if self._is_done:
            return self.is_uneven
        return self._is_cut(num_parts) or self._options.precision == "fp16"

    def _is_cut(self, num_parts: int) -> bool:
        return num_parts * self._program.axis_size("dp") > 1

    def check(
        self,
        parts: Sequence[Batch],
        labels: Sequence[Any],
        device: torch.device,
        around: Around = nullcontext,
        labels_differ: bool = False,
        accumulates: bool = False,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Run the checks if they are due. Collective over the mesh.

        Args:
            around: Makes the engine's context of a forward.
            labels_differ: True if the engine refuses losses of unknown reduction, since numbers of labels differ.
            accumulates: True if a backward may accumulate gradients in parameters without an effect on the engine.
            failed: Called with an error on its rank, see ``StageRuns``.

        Raises:
            BuildError: on all ranks: a loss that is not a mean over rows; injected gradients with fp16; or, with
                ``strict=True``, modules that mix rows.
        """
        if not self.is_due(len(parts)):
            return
        if is_first_rank(self._program):
            log_disabled_checks(self._off)
        rows = [Rows(*each, self._options.batch_rows) for each in zip(parts, labels, strict=True)]
        if len(self._off) < len(CHECKS) and rows[0].number:
            self._modes.set(True)
            runs = StageRuns(self._program, self._options, device, around, accumulates, failed)
            problem = next(filter(None, (self._options.batch_rows.division_problem(each.as_dict()) for each in rows)), None)
            try:
                if runs.any_rank(problem is not None):
                    get_logger().warning("first-step checks were left out: %s", problem or "another rank cannot cut its batch")
                else:
                    self._run_checks(rows, runs, labels_differ)
            except RunFailedError as err:  # the step itself will fail with a better message
                get_logger().debug("first-step checks were left out: %s", err)
                return
        if self.is_uneven:
            self._marks.end()
        self._is_done = True

    def _run_checks(self, parts: list[Rows], runs: StageRuns, labels_differ: bool) -> None:
        ignored = self._options.ignored_label
        others = other_replicas(parts[0], self._program, runs.device, ignored) if self.is_uneven else []
        halves = dissimilar_halves([*parts, *others], ignored)
        whole, known = runs.plan_rows(join_rows(halves)), None
        cut = Partition(len(parts), self._program.axis_size("dp"))
        looks_at_rows = "rows" not in self._off and self._is_cut(len(parts))
        if "injected" not in self._off and not self._is_done:
            found = InjectedCheck(self._program, self._options, runs).run(whole, halves, cut if looks_at_rows else None)
            if found is not None:
                known, self.injects = found
            if known is not None and self.injects:
                self._labels = LabelCounts(self._program, ignored, whole.rows, known.whole.counted, runs.device)
        if looks_at_rows:
            RowsCheck(self._program, self._options, runs, parts, labels_differ, self._warned).run(halves, known)
