"""Layouts that the constraints allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from slapo_core import SlapoError, UnknownNameError


class Layout(NamedTuple):
    """One way to run a model.

    Args:
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline ranks, each with one stage.
        dp: Number of replicas.
        rows: Rows of a micro-batch.
        microbatches: Micro-batches of a step on each replica.
        sequence_parallel: True if tensor parallelism also splits what lies between its layers.
        data_parallel: ``"ddp"`` or ``"fsdp"``; ``"ddp"`` with one replica.
        pipeline_schedule: Name of the pipeline schedule; ``"1f1b"`` without a pipeline.
    """

    tp: int
    pp: int
    dp: int
    rows: int
    microbatches: int
    sequence_parallel: bool = False
    data_parallel: str = "ddp"
    pipeline_schedule: str = "1f1b"

    def __str__(self) -> str:
        words = [f"tp={self.tp}", f"pp={self.pp}", f"dp={self.dp}"]
        if self.dp > 1:
            words.append(self.data_parallel)
        if self.sequence_parallel:
            words.append("sequence parallel")
        if self.pp > 1:
            words.append(self.pipeline_schedule)
        return " ".join([*words, f"micro-batches={self.microbatches}x{self.rows}"])


CONSTRAINTS = Layout._fields
"""Names of constraints, each with a value or a list of values."""


class Rejection(NamedTuple):
    """Layouts that cannot run.

    Args:
        what: The layout, or what some layouts have in common.
        reason: One sentence.
    """

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def check_constraints(constraints: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values by name.

    Raises:
        UnknownNameError: no such constraint.
    """
    for name in constraints:
        if name not in CONSTRAINTS:
            raise UnknownNameError.of("constraint", name, CONSTRAINTS)
    return {name: tuple(value) if isinstance(value, (list, tuple, range)) else (value,) for name, value in constraints.items()}


class LayoutSpace:
    """All layouts of a number of ranks, without those that the constraints rule out.

    Args:
        ranks: Number of ranks.
        global_batch: Rows of a step over all replicas.
        blocks: Number of blocks that stages can be cut at.
        devices_per_node: Largest ``tp`` unless a constraint says otherwise.
        constraints: Allowed values by name, from ``check_constraints``.

    Raises:
        SlapoError: the constraints leave no layout; says which one binds.
    """

    def __init__(
        self, ranks: int, global_batch: int, blocks: int, devices_per_node: int, constraints: Mapping[str, tuple[Any, ...]]
    ) -> None:
        self.ranks, self.global_batch, self.blocks = ranks, global_batch, blocks
        self.devices_per_node, self.constraints = devices_per_node, constraints
        self.rejected: list[Rejection] = []

    def degrees(self) -> list[int]:
        """Return the degrees of tensor parallelism."""
        largest = max([self.devices_per_node, *self.constraints.get("tp", ())])
        found = [tp for tp in _divisors(self.ranks) if tp <= largest and self._allows("tp", tp)]
        if not found:
            given = ", ".join(map(str, self.constraints.get("tp", ())))
            nearest = ", ".join(map(str, _divisors(self.ranks)[:8]))
            raise SlapoError(f"plan: tp={given} does not divide {self.ranks} ranks; these do: {nearest}")
        return found

    def layouts(self, tp: int) -> Iterator[Layout]:
        """Iterate over the layouts with a degree of tensor parallelism."""
        for pp in _divisors(self.ranks // tp):
            if not self._allows("pp", pp):
                continue
            if pp > max(1, self.blocks):
                self.rejected.append(Rejection(f"tp={tp} pp={pp}", f"the model has {self.blocks} blocks to cut between"))
                continue
            dp = self.ranks // tp // pp
            if self._allows("dp", dp):
                yield from self._batches(tp, pp, dp)

    def _batches(self, tp: int, pp: int, dp: int) -> Iterator[Layout]:
        share, rest = divmod(self.global_batch, dp)
        if rest or not share:
            near = max(dp, round(self.global_batch / dp) * dp)
            reason = f"a global batch of {self.global_batch} rows is not divisible by {dp} replicas; {near} is the nearest"
            self.rejected.append(Rejection(f"tp={tp} pp={pp} dp={dp}", reason))
            return
        for rows in _divisors(share):
            microbatches = share // rows
            if rows & (rows - 1) and rows != share and "rows" not in self.constraints:
                continue  # powers of two, and the whole share
            if self._allows("rows", rows) and self._allows("microbatches", microbatches):
                yield from self._options(Layout(tp, pp, dp, rows, microbatches))

    def _options(self, layout: Layout) -> Iterator[Layout]:
        for sequence_parallel in (False, True) if layout.tp > 1 else (False,):
            for data_parallel in ("ddp", "fsdp") if layout.dp > 1 else ("ddp",):
                found = layout._replace(sequence_parallel=sequence_parallel, data_parallel=data_parallel)
                allowed = all(self._allows(name, getattr(found, name)) for name in ("sequence_parallel", "data_parallel"))
                if allowed and self._allows("pipeline_schedule", found.pipeline_schedule):
                    yield found

    def _allows(self, name: str, value: Any) -> bool:
        return name not in self.constraints or value in self.constraints[name]


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
