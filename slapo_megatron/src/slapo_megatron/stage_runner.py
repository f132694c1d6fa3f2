"""Runs of stages as Megatron's schedules call them: the values between stages cross in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import Program
from slapo_training import EngineStageRunner, OptimizerFactory, StageMemory, StepGroups
from slapo_training.batches import Batch

from .configuration.options import MegatronOptions
from .estimation.stage_memory import MegatronStageMemory
from .pipeline import Borders, borders


class MegatronStageRunner(EngineStageRunner):
    """Runs stages as ``MegatronEngine`` does."""

    options: MegatronOptions

    def __init__(self, program: Program, options: MegatronOptions) -> None:
        super().__init__(program, options)
        self._planned = program

    def plan(self, program: Program, part: Batch) -> Program:
        self._planned = super().plan(program, part)
        return self._planned

    def run(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        values = [_copy_of_bits(each) for each in received]
        result = self.run_stage(program, stage, values, part)
        if stage + 1 == len(program.stages):
            return result.clone()
        layout, size = self._border(program, stage)
        return (layout.layouts[stage + 1].pack(result, size),)

    def _border(self, program: Program, stage: int) -> tuple[Borders, int]:
        found = borders(program.stages, self.options.dtype, torch.device("cpu"))
        alone = len(program.stages) == program.axis_size("pp")
        return found, found.layouts[stage + 1].size if alone else found.size

    def memories(self, optimizer: OptimizerFactory | None) -> Sequence[Callable[[nn.Module], StageMemory]]:
        if optimizer is None or not self.options.trains:
            return ()
        options, replicas, tied = self.options, StepGroups(self.program).ranks("dp"), self._tied_names()

        def make(module: nn.Module) -> StageMemory:
            index = next(each.index for each in self._planned.stages if each.module is module)
            place = index == 0, index >= self.program.axis_size("pp")
            return MegatronStageMemory(module, options, optimizer, replicas, *place, tied)

        return (make,)

    def _tied_names(self) -> set[str]:
        """Return the names of the parameters that several ranks along ``pp`` hold."""
        rank_of = self.program.rank_of
        return {name for tie in self.program.ties if len({*map(rank_of, tie.stages)}) > 1 for name in tie.names}


def _copy_of_bits(value: torch.Tensor) -> torch.Tensor:
    """Return a received value as ``Layout.unpack`` gives it: values without a gradient in memory of their own."""
    return value if value.requires_grad else value.clone()
