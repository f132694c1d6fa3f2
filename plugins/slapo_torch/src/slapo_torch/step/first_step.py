"""First-step checks of this engine, and weights of micro-batches if the model injects gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from slapo_core import Program
from slapo_training.first_step import FirstStep
from slapo_training.options import CommonOptions

from ..gradients.ddp import DDPReplicas
from .engine_step import EngineStep
from .microbatch_weights import MicroBatchWeight
from .stage_call import autocast_context
from .tensor_parallel_failures import TensorParallelPeers

if TYPE_CHECKING:
    from ..fsdp.sharded_replicas import FSDPReplicas


class TorchFirstStep(FirstStep):
    """First-step checks that run forwards in the contexts of this engine: autocast and FSDP units."""

    def __init__(self, program: Program, options: CommonOptions) -> None:
        super().__init__(program, options)
        self._torch_options = options

    def check_if_due(
        self,
        step: EngineStep,
        device: torch.device,
        shards: FSDPReplicas | None,
        replicas: DDPReplicas | None,
        peers: TensorParallelPeers | None,
    ) -> MicroBatchWeight:
        """Run the checks if they are due, with FSDP's parameters gathered. Collective.

        Returns the weight of micro-batches, corrected if the model injects gradients.

        Raises:
            BuildError: on all ranks, see ``FirstStep.check``.
        """
        parts, labels, weight = step.parts, step.labels, step.weight
        self.is_uneven = step.marks_differ
        if self.is_due(len(parts)):
            around = partial(self._step_context, device, shards)
            failed = None if peers is None else peers.synchronize_failure
            with nullcontext() if replicas is None else replicas.no_sync():
                self.check(parts, labels, device, around, weight.differs, shards is None, failed)
            if peers is not None:
                peers.begin_step()  # an error of the checks is no error of the step
            if shards is not None:  # units start the step in the same state as without checks
                shards.release()
                shards.gather()
        if not self.injects:
            return weight
        return weight._replace(injects=True, unit=self.mean_labels(parts, labels, device) or weight.unit)

    @contextmanager
    def _step_context(self, device: torch.device, shards: FSDPReplicas | None, has_backward: bool) -> Iterator[None]:
        with autocast_context(self._torch_options, device.type):
            if shards is None or shards.unit_runtime is None:
                yield
                return
            with shards.unit_runtime.microbatch(has_backward):
                yield
