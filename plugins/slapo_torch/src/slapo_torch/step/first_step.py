"""The first-step checks of this engine, and shares of losses where a model injects gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import Program
from slapo_training.batches import Batch
from slapo_training.first_step import FirstStep
from slapo_training.options import CommonOptions

from ..gradients.ddp import Replicas
from .microbatch_weights import Share
from .stage_call import precision
from .tensor_parallel_failures import Peers

if TYPE_CHECKING:
    from ..fsdp.sharded_replicas import ShardedReplicas


class TorchFirstStep(FirstStep):
    """The checks, in the contexts that this engine puts around a forward."""

    def __init__(self, program: Program, options: CommonOptions) -> None:
        super().__init__(program, options)
        self._torch_options = options

    def look(
        self,
        parts: Sequence[Batch],
        labels: Sequence[Any],
        share: Share,
        device: torch.device,
        shards: ShardedReplicas | None,
        replicas: Replicas | None,
        peers: Peers | None,
    ) -> Share:
        """Make the checks where they are due. Collective.

        Args:
            parts: Micro-batches.
            labels: The labels of each, for the loss function.
            share: The share of each loss in that of the batch.
            device: Device of this rank.
            shards: The gathered parameters of FSDP, or None.
            replicas: Averages gradients of DDP, or None.
            peers: The tensor-parallel ranks, or None.

        Returns:
            The share, which says whether the model injects gradients.

        Raises:
            BuildError: on all ranks, see ``FirstStep.check``.
        """
        if self.is_due(len(parts)):
            around = partial(self._around, device, shards)
            with nullcontext() if replicas is None else replicas.accumulating():
                self.check(parts, labels, device, around, share.differs, shards is None, None if peers is None else peers.meet)
            if peers is not None:
                peers.begin()  # whoever failed above has not failed in the step
            if shards is not None:  # as if nothing had run yet
                shards.release()
                shards.gather()
        if not self.injects:
            return share
        return share._replace(injects=True, unit=self.mean_labels(parts, labels, device) or share.unit)

    @contextmanager
    def _around(self, device: torch.device, shards: ShardedReplicas | None, has_backward: bool) -> Iterator[None]:
        with precision(self._torch_options, device.type):
            if shards is None or shards.walk is None:
                yield
                return
            with shards.walk.microbatch(has_backward):
                yield
