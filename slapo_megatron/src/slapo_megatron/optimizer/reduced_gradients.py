"""Gradients in Megatron's buffers, behind its reduction, for the user's hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program
from slapo_training.gradient_hooks import GradientAccess

from ..configuration.options import MegatronOptions


class ReducedGradients(GradientAccess):
    """Reads and writes ``main_grad``.

    Args:
        program: Its replicas share the gradients out with the distributed optimizer.
        options: Options of the engine.
        chunks: Megatron's ``DistributedDataParallel`` around each stage of this rank.
    """

    counts_unused = steps_all = True

    def __init__(self, program: Program, options: MegatronOptions, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        shares = options.distributed_optimizer and program.mesh is not None and program.axis_size("dp") > 1
        self._replicas = program.mesh.get_group("dp") if shares and program.mesh is not None else None
        if options.precision == "bf16":
            self.keeps_weights = "target 'megatron' keeps in fp32 beside the model's in bf16"

    def begin(self, hooked: Sequence[nn.Parameter]) -> None:
        """Let all replicas have the whole gradients that the distributed optimizer has shared out. Collective over these."""
        if self._replicas is None:
            return
        known = {id(parameter) for parameter in hooked}
        for bucket in self._buckets():
            if any(id(parameter) in known for parameter in bucket.params_list):
                rows = bucket.grad_data.view(self._replicas.size(), -1)
                dist.all_gather_into_tensor(bucket.grad_data, rows[self._replicas.rank()].clone(), group=self._replicas)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient."""
        return parameter.main_grad if parameter.requires_grad else None  # type: ignore[attr-defined]

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Let this be the reduced gradient."""
        assert gradient is not None
        parameter.main_grad.copy_(gradient)  # type: ignore[attr-defined]

    def _buckets(self) -> Iterator[Any]:
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield from buffer.buckets
