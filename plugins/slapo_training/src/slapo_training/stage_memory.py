"""Tensors and collectives of an engine around one stage, for planners; subclasses act as their engine does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch


class CollectiveRecord(NamedTuple):
    """One collective, or one message of a pipeline, as one rank sees it.

    Args:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``, ``"reduce"``,
            ``"gather"``, ``"scatter"`` or ``"send"``.
        nbytes: Bytes of the whole tensor on one rank: the reduced tensor, the gathered result, the input of a reduce-scatter
            or all-to-all, the message.
        ranks: Global ranks of the group, in order; the two ends of a message.
        overlapped: True if the rank goes on computing while it runs.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    overlapped: bool = False


class MessageSizes(NamedTuple):
    """Bytes of the messages of one stage.

    Args:
        received: Bytes that it receives.
        sent: Bytes of its outputs; 0 in the last stage.
        sent_back: Bytes of the gradients of what it received.
    """

    received: int
    sent: int
    sent_back: int


class StageMemory:
    """Tensors of an engine beside one stage: flat weights, main copies, gradient buffers, optimizer state.

    A subclass allocates them as its engine does. Its tensors are fake; the planner counts each until it is freed. The methods
    are called in the order of a step. ``is_last`` tells the last micro-batch of the step.

    Args:
        replicas: Global ranks of the replicas, in order.

    Attributes:
        owns_parameters: True if ``held`` has the memory of the parameters, whose own is not counted.
        repeats_blocks: True if nothing depends on the order in which a backward finishes gradients, so that a planner may run a
            few of many equal blocks; parameters of the others get gradients before ``end_backward``.
        records_order: True if a micro-batch runs before the first step, whose order of modules the engine keeps.
        replicas: Global ranks of the replicas.
        collectives: Collectives that the engine has started, in order; the planner clears the list.
    """

    owns_parameters = False
    records_order = False
    repeats_blocks = False

    def __init__(self, replicas: Sequence[int] = (0,)) -> None:
        self.replicas = tuple(replicas)
        self.collectives: list[CollectiveRecord] = []

    def communicate(self, kind: str, nbytes: int, ranks: Sequence[int] | None = None, overlapped: bool = False) -> None:
        """Note a collective that the engine starts; one of a single rank, or of no bytes, is left out.

        Args:
            kind: As in ``CollectiveRecord``, as are the bytes.
            nbytes: Its bytes.
            ranks: Global ranks of the group; None for the replicas.
            overlapped: True if the rank goes on computing while it runs.
        """
        group = self.replicas if ranks is None else tuple(ranks)
        if len(group) > 1 and nbytes:
            self.collectives.append(CollectiveRecord(kind, nbytes, group, overlapped))

    def run_context(self) -> AbstractContextManager[None]:
        """Return a context in which the stage runs, for functions that the engine replaces."""
        return nullcontext()

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the tensors that exist between steps beside parameters and buffers of the stage.

        Keys are kinds of memory: ``"parameters"``, ``"gradients"``, ``"buckets"``, ``"optimizer"`` (with main copies).
        """
        return {}

    def begin_step(self) -> None:
        """Begin a step, before its first forward."""

    def end_recording(self) -> None:
        """End the micro-batch before the first step, with ``records_order``."""

    def begin_backward(self, is_last: bool) -> None:
        """Prepare the backward of a micro-batch."""

    def end_backward(self, is_last: bool) -> None:
        """Finish the backward of a micro-batch, with the reductions that follow it."""

    def step(self) -> None:
        """Step the optimizer."""
