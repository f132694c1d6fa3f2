"""Numbers of labels of a batch's losses, computed before the batch runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slapo_core import Program

from ..batches.microbatches import labels_of
from ..distributed.ranks import all_reduce
from ..losses.reductions import LabelMean
from .row_subsets import Rows

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
        dp = self._program.axis_size("dp")
        if dp > 1:
            assert self._program.mesh is not None
            dist.all_reduce(total, group=self._program.mesh.get_group("dp"))
        return total.item() / (len(parts) * dp)
