"""Collectives and messages of a step of DeepSpeed beside those in its forwards, backwards and in its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from slapo_core import Program
from slapo_training import CollectiveRecord, StepFacts, StepGroups, boundary_bytes

from .configuration.options import DeepSpeedOptions


class StepCollectives:
    """Collectives of one rank along ``pp`` in a step that is not the first.

    Args:
        program: The program.
        options: Options of the engine.
        rank: Rank along ``pp``.
        facts: Facts from the runs of the rank's stage.
    """

    def __init__(self, program: Program, options: DeepSpeedOptions, rank: int, facts: StepFacts) -> None:
        self._program, self._options, self._rank, self._facts = program, options, rank, facts
        self._groups = StepGroups(program, rank)
        self._replicas = program.axis_size("dp")

    def records(self) -> Iterator[CollectiveRecord]:
        """Yield the records in the order of the step."""
        yield from self._groups.batch_comparison()
        received, sent_back = boundary_bytes(self._facts.stages)
        for action in self._facts.actions:
            yield from self._groups.messages(action, received, sent_back)
        yield from self._ties()
        if self._options.zero_stage == 3 or (self._options.zero_stage and self._replicas > 1):
            others = self._program.axis_size("pp") * self._program.axis_size("tp")
            yield from self._groups.on_all_ranks(8 * (1 + 2 * others))  # the order of the gradients
        if self._options.largest_norm and not self._options.zero_stage:
            yield from self._norm()
        yield from self._loss()

    def _ties(self) -> Iterator[CollectiveRecord]:
        for parameter, ranks in self._groups.ties():
            nbytes = parameter.numel() * self._options.dtype.itemsize
            yield CollectiveRecord("all_reduce", nbytes, tuple(map(self._groups.peer, ranks)))

    def _norm(self) -> Iterator[CollectiveRecord]:
        shards = ("pp", "tp") if len(self._program.stages) > 1 else ("tp",)
        for ranks in (self._groups.ranks(*shards), self._groups.ranks("dp")):
            if len(ranks) > 1:
                yield CollectiveRecord("all_reduce", 4, ranks)

    def _loss(self) -> Iterator[CollectiveRecord]:
        if self._replicas > 1 and self._rank + 1 == len(self._program.stages):
            yield self._groups.all_reduce("dp", 4)
        if len(self._program.stages) > 1:
            yield CollectiveRecord("broadcast", 8, self._groups.ranks("pp"))
