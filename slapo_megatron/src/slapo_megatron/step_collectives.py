"""Collectives and messages of a step of Megatron beside those in its forwards, backwards and in its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slapo_core import Program
from slapo_training import CollectiveRecord, StepFacts, StepGroups

from .configuration.options import MegatronOptions
from .pipeline import borders


class StepCollectives:
    """Collectives of one rank along ``pp`` in a step that is not the first.

    Args:
        program: The program.
        options: Options of the engine.
        rank: Rank along ``pp``.
        facts: Facts from the runs of the rank's stages.
    """

    def __init__(self, program: Program, options: MegatronOptions, rank: int, facts: StepFacts) -> None:
        self._program, self._options, self._facts = program, options, facts
        self._groups = StepGroups(program, rank)

    def records(self) -> Iterator[CollectiveRecord]:
        """Yield the records in the order of the step."""
        yield from self._groups.batch_comparison()
        sizes = self._message_sizes()
        for action in self._facts.actions:
            yield from self._groups.messages(action, sizes, sizes)
        yield from self._ties()
        ranks = self._groups.ranks(*(("pp", "dp", "tp") if self._options.distributed_optimizer else ("pp", "tp")))
        if len(ranks) > 1:
            yield CollectiveRecord("all_reduce", 4, ranks)  # the norm of the gradients
        yield from self._groups.on_all_ranks(4)  # the loss

    def _message_sizes(self) -> list[list[int]]:
        """Return the bytes of the one tensor that each stage receives; the gradient that it sends back has the same."""
        stages = self._facts.stages
        if len(stages) == 1:
            return [[]]
        plan = borders(stages, self._options.dtype, torch.device("cpu"))
        is_alone = len(stages) == self._program.axis_size("pp")
        return [[plan.dtype.itemsize * (each.size if is_alone else plan.size)] for each in plan.layouts]

    def _ties(self) -> Iterator[CollectiveRecord]:
        in_fp32 = self._options.section("ddp").get("grad_reduce_in_fp32", True)
        dtype = torch.float32 if in_fp32 else self._options.dtype
        for parameter, ranks in self._groups.ties():
            yield CollectiveRecord("all_reduce", parameter.numel() * dtype.itemsize, tuple(map(self._groups.peer, ranks)))
