"""Loss over all replicas that need not exist, for estimates: its memory, and the collectives that it would start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from slapo_core import Program

from .microbatch_loss import LossFn, MicroBatchLoss
from .replica_loss import ReplicaLoss, SinglePass

_FACTS = 3
"""Numbers by which replicas compare the shapes of their outputs."""


class FakeReplicaLoss(ReplicaLoss):
    """Loss of the outputs of all replicas, on a rank with the last stage. Nothing is sent.

    With several micro-batches the loss is that of each alone: memory of the others' outputs is not counted.

    Args:
        parts: Number of micro-batches of a replica.
        ranks: Global ranks of the replicas.

    Attributes:
        collectives: Collectives of one step, as the fields of a ``CollectiveRecord``.
    """

    def __init__(
        self,
        program: Program,
        loss_fn: LossFn,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
        parts: int,
        ranks: tuple[int, ...],
    ) -> None:
        super().__init__(program, loss_fn, device, precision)
        self._is_last, self._group = True, None
        self._parts, self._ranks = parts, ranks
        self.collectives: list[tuple[str, int, tuple[int, ...]]] = []

    def loss_of_part(self, labels: Any, rows: int | None) -> MicroBatchLoss:
        """Return the loss of one micro-batch, given its labels and its number of rows."""
        return SinglePass(self, labels, rows)

    @property
    def _is_gathered(self) -> bool:
        return self._parts == 1 and len(self._ranks) > 1

    def _num_parts(self, own: int) -> int:
        return own * len(self._ranks) if self._is_gathered else own

    def _first_part(self, own: int) -> int:
        return 0

    def _gather_outputs(self, own: list[torch.Tensor], has_rows: bool) -> torch.Tensor:
        mine = torch.cat(own) if has_rows else torch.stack(own)
        self._communicate("all_gather", mine.nbytes * self._parts * len(self._ranks))
        if not self._is_gathered:
            return mine
        return torch.cat([torch.empty_like(mine) for _ in self._ranks])

    def _check_kinds(self, error: Exception | None, tensors: dict[str, torch.Tensor]) -> None:
        if error is not None:
            raise error
        self.collectives.clear()
        self._communicate("all_reduce", torch.int64.itemsize * _FACTS)

    def _check_same(self, stacked: dict[str, torch.Tensor], own: Sequence[dict[str, torch.Tensor]]) -> None:
        """Compare nothing, as the outputs have no values."""

    def _communicate(self, kind: str, nbytes: int) -> None:
        if len(self._ranks) > 1:
            self.collectives.append((kind, nbytes, self._ranks))
