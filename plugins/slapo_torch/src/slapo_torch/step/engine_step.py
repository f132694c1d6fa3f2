"""One batch on its way through the engine, the comparison of the batches of all ranks, and the checks of the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core import Program, raise_on_all_ranks
from slapo_training.batch_agreement import BatchFingerprints, check_boundaries, check_contents, check_shapes, replica_extremes
from slapo_training.batches import Batch
from slapo_training.distributed import all_reduce
from slapo_training.first_step import FirstStep

from ..gradients.reduction import DDPReplicas
from .gradient_accumulation import StepResult
from .stage_call import MicroBatchWeight, autocast_context
from .tensor_parallel_failures import TensorParallelPeers

if TYPE_CHECKING:
    from ..fsdp.sharded_replicas import FSDPReplicas


Runner = Callable[[list[Batch], list[Any], MicroBatchWeight], StepResult]
"""Runs micro-batches with their labels and their weight in the loss of the batch."""


@dataclass
class EngineStep:
    """One batch that the engine trains or evaluates.

    Each phase of the step fills in the attributes that the next phases read: preparation of the batch on each rank, comparison
    of all ranks, and reduction of the loss.

    Args:
        is_outdated: True if parameters were unfrozen since the last step; on any rank, after the comparison.

    Attributes:
        labels: Labels of each micro-batch; None without ``loss_fn``.
        facts: Numbers that are compared between all ranks.
        content: Fingerprint of the batch's values; 0 if no ranks share a batch.
        labels_differ: True if numbers of labels differ between micro-batches or ranks.
        marks_differ: True if marks of rows differ, see ``FirstStep.marks``.
        has_unused: True if some rank has trainable parameters that no micro-batch used.
        has_unchecked: True if some rank has first gradients that tensor-parallel ranks have to compare.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool
    is_outdated: bool = False
    schedule: tuple[str, int] = field(init=False)
    parts: list[Batch] = field(init=False)
    labels: list[Any] = field(init=False)
    facts: BatchFingerprints = field(init=False)
    content: int = field(init=False)
    runner: Runner = field(init=False)
    labels_differ: bool = field(init=False)
    marks_differ: bool = field(init=False)
    weight: MicroBatchWeight = field(init=False)
    has_unused: bool = False
    has_unchecked: bool = False
    gradient_factor: float = 1.0

    def prepare_on_all_ranks(self, prepare: Callable[[EngineStep], None], program: Program, device: torch.device) -> int:
        """Prepare this rank's batch; go on only if no rank failed and the batches are of one kind. Collective.

        Without an error there is one small reduction; messages are exchanged only after an error. ``prepare`` fills in the
        attributes up to ``runner``, with no message to other ranks.

        Returns:
            The largest number of labels of a micro-batch on any rank.

        Raises:
            Exception: the error of ``prepare`` on this rank.
            BuildError: another rank failed, or ranks have different kinds of batches.
        """
        error, facts, content = None, BatchFingerprints([0] * 4, [0] * 4), 0
        try:
            prepare(self)
            facts, content = self.facts, self.content
        except Exception as err:
            error = err
        slots = [slot for each in (content, facts.inputs) for slot in replica_extremes(program, each, error is None)]
        row = [error is not None, self.is_outdated, *facts.high, *(-number for number in facts.low), *slots]
        largest = torch.tensor(row, dtype=torch.int64, device=device)
        failed, outdated, *bounds = all_reduce(largest, program.mesh, dist.ReduceOp.MAX).tolist()
        if failed:
            raise_on_all_ranks(error, program.mesh)
        high, low, slots = bounds[:4], [-bound for bound in bounds[4:8]], bounds[8:]
        check_shapes(high[0], low[0])
        check_contents(slots[: len(slots) // 2])
        check_boundaries(slots[len(slots) // 2 :])
        self.is_outdated, self.labels_differ, self.marks_differ = bool(outdated), high[1:3] != low[1:3], high[3] != low[3]
        return int(high[1])


class TorchFirstStep(FirstStep):
    """First-step checks that run forwards in the contexts of this engine: autocast and FSDP units."""

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
                peers.begin_step()  # an error of the checks is not an error of the step
            if shards is not None:  # units start the step in the same state as without checks
                shards.release()
                shards.gather()
        if not self.injects:
            return weight
        return weight._replace(injects=True, unit=self.mean_labels(parts, labels, device) or weight.unit)

    @contextmanager
    def _step_context(self, device: torch.device, shards: FSDPReplicas | None, has_backward: bool) -> Iterator[None]:
        with autocast_context(self._options, device.type):
            if shards is None or shards.unit_runtime is None:
                yield
                return
            with shards.unit_runtime.microbatch(has_backward):
                yield
