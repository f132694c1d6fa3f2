"""Runs of stages as DeepSpeed's engine and its pipeline call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from slapo_core import Program
from slapo_training import EngineStageRunner, OptimizerFactory, StageMemory, StepGroups
from slapo_training.batches import Batch

from .configuration.options import DeepSpeedOptions
from .estimation.gathered_memory import GatheredMemory
from .estimation.partitioned_memory import PartitionedMemory
from .estimation.replicated_memory import ReplicatedMemory
from .estimation.zero_settings import ZeroRanks, ZeroSettings
from .pipeline import pack


class DeepSpeedStageRunner(EngineStageRunner):
    """Runs stages as ``DeepSpeedEngine`` does.

    Raises:
        BuildError: the configuration has a setting whose memory is not estimated.
    """

    options: DeepSpeedOptions

    def __init__(self, program: Program, options: DeepSpeedOptions) -> None:
        super().__init__(program, options)
        self._is_pipeline = len(program.stages) > 1
        self._settings = ZeroSettings.of(options, self._is_pipeline)

    def run(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        copies = [each.clone() for each in received]  # DeepSpeed keeps what it received, and runs the stage on copies
        result = self.run_stage(program, stage, copies, part)
        return result if stage + 1 == len(program.stages) else pack(result, program.stages[stage + 1].inputs, stage)

    def memories(self, optimizer: OptimizerFactory | None) -> Sequence[Callable[[nn.Module], StageMemory]]:
        if optimizer is None or not self.options.trains:
            return ()
        groups, shards = StepGroups(self.program), ("pp", "tp") if self._is_pipeline else ("tp",)
        settings, ranks = self._settings, ZeroRanks(groups.ranks("dp"), groups.ranks(*shards))
        if settings.stage == 0:
            return (lambda module: ReplicatedMemory(module, optimizer, ranks),)
        if settings.stage < 3:
            # the last replica's gradients are the first that a backward finishes; it keeps them from then on
            last = len(ranks.replicas) - 1
            replicas = [None, last] if last and (settings.stage == 2 or settings.overlaps) else [None]
            return [partial(self._partitioned_memory, optimizer, ranks, replica) for replica in replicas]
        return (lambda module: GatheredMemory(module, optimizer, settings, ranks),)

    def _partitioned_memory(
        self, optimizer: OptimizerFactory, ranks: ZeroRanks, replica: int | None, module: nn.Module
    ) -> PartitionedMemory:
        return PartitionedMemory(module, optimizer, self._settings, ranks, self._is_pipeline, replica)
