"""Memory of DeepSpeed without ZeRO: gradients are flattened to be reduced, and the optimizer steps the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from slapo_training import OptimizerFactory, StageMemory, initialized_optimizer

from .flat_groups import flatten, state_tensors
from .zero_settings import ZeroRanks

_REDUCED_AT_ONCE = 500_000_000
"""Elements after which DeepSpeed reduces what it has flattened."""


class ReplicatedMemory(StageMemory):
    """Memory of stage 0 of ZeRO around one stage of the program.

    Args:
        module: The stage, with fake tensors.
        optimizer: Makes the optimizer.
        ranks: Groups of ranks.
    """

    repeats_blocks = True

    def __init__(self, module: nn.Module, optimizer: OptimizerFactory, ranks: ZeroRanks) -> None:
        super().__init__(ranks.replicas)
        self._trained = [each for each in module.parameters() if each.requires_grad]
        self._optimizer = initialized_optimizer(optimizer, self._trained)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return {"optimizer": state_tensors(self._optimizer)}

    def end_backward(self, is_last: bool) -> None:
        if is_last:
            self._reduce()

    def _reduce(self) -> None:
        bucket: list[torch.Tensor] = []
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(each.numel() for each in bucket) > _REDUCED_AT_ONCE:
                self._reduce_bucket(bucket)
                bucket = []
        if bucket:
            self._reduce_bucket(bucket)

    def _reduce_bucket(self, gradients: Sequence[torch.Tensor]) -> None:
        self.communicate("all_reduce", flatten(gradients).nbytes)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
