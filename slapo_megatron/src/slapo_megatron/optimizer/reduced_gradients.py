"""Access to the reduced gradients in Megatron's buffers, for the user's gradient hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program
from slapo_training.gradient_hooks import GradientAccess

from ..configuration.options import MegatronOptions
from ..process_state._megatron_private import gradient_buckets, main_grad


class ReducedGradients(GradientAccess):
    """Access to ``main_grad``, the reduced gradient, which replicas shard with the distributed optimizer."""

    counts_unused = steps_all = True

    def __init__(self, program: Program, options: MegatronOptions, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        shares = options.distributed_optimizer and program.mesh is not None and program.axis_size("dp") > 1
        self._replicas = program.mesh.get_group("dp") if shares and program.mesh is not None else None
        if options.precision == "bf16":
            self.keeps_weights = "target 'megatron' keeps in fp32 beside the model's in bf16"

    def begin(self, hooked: Sequence[nn.Parameter]) -> None:
        """All-gather the gradients that the distributed optimizer has sharded. Collective over the replicas."""
        if self._replicas is None:
            return
        known = {id(parameter) for parameter in hooked}
        for parameters, gradients in gradient_buckets(self._chunks):
            if any(id(parameter) in known for parameter in parameters):
                rows = gradients.view(self._replicas.size(), -1)
                dist.all_gather_into_tensor(gradients, rows[self._replicas.rank()].clone(), group=self._replicas)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return main_grad(parameter) if parameter.requires_grad else None

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        main_grad(parameter).copy_(gradient)
