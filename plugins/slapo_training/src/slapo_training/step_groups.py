"""Process groups of the collectives of a step, for ranks along ``pp`` that need not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slapo_core import Program, Stage

from .stage_memory import CollectiveRecord
from .step_model import PipelineAction

__all__ = ["StepGroups", "boundary_bytes"]

MessageSizes = Sequence[Sequence[int]]
"""Bytes of the messages that each stage receives, or sends back."""

_FACTS_OF_BATCH = 9
"""Numbers that ranks compare before a step, without slots of replicas."""


class StepGroups:
    """Process groups of one rank along ``pp``; its coordinates along the other axes are those of this process.

    Args:
        program: The program.
        rank: Rank along ``pp``; None for that of this process.
    """

    def __init__(self, program: Program, rank: int | None = None) -> None:
        self._program = program
        self._rank = program.axis_rank("pp") if rank is None else rank
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._peers: dict[int, int] = {}

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks along some axes through this rank, in order; the rank alone for axes that the mesh lacks."""
        mesh = self._program.mesh
        if mesh is None:
            return (0,)
        if axes not in self._known:  # a mesh makes the tensor of all its ranks anew each time
            place = [slice(None) if name in axes else self._coordinate(name) for name in mesh.mesh_dim_names or ()]
            self._known[axes] = tuple(mesh.mesh[tuple(place)].reshape(-1).tolist())
        return self._known[axes]

    def _coordinate(self, axis: str) -> int:
        return self._rank if axis == "pp" else self._program.axis_rank(axis)

    def peer(self, pipeline_rank: int) -> int:
        """Return the global rank of another rank along ``pp`` with the same other coordinates."""
        if pipeline_rank not in self._peers:
            self._peers[pipeline_rank] = StepGroups(self._program, pipeline_rank).ranks()[0]
        return self._peers[pipeline_rank]

    def all_reduce(self, axis: str, nbytes: int, overlapped: bool = False) -> CollectiveRecord:
        """Return the record of an all-reduce along an axis."""
        return CollectiveRecord("all_reduce", nbytes, self.ranks(axis), overlapped)

    def on_all_ranks(self, nbytes: int) -> Iterator[CollectiveRecord]:
        """Yield the all-reduces that together reduce over all ranks of the mesh."""
        mesh = self._program.mesh
        for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
            if self._program.axis_size(axis) > 1:
                yield self.all_reduce(axis, nbytes)

    def batch_comparison(self) -> Iterator[CollectiveRecord]:
        """Yield the reductions by which engines of other projects compare the batches of all ranks, see ``cut_together``."""
        replicas, inner = self._program.axis_size("dp"), self._program.axis_size("pp") * self._program.axis_size("tp")
        yield from self.on_all_ranks(8 * (_FACTS_OF_BATCH + (2 * replicas if inner > 1 else 0)))

    def messages(self, action: PipelineAction, received: MessageSizes, sent_back: MessageSizes) -> Iterator[CollectiveRecord]:
        """Yield the messages before and after a computation; stages of one rank pass tensors on without.

        Args:
            action: The computation.
            received: Bytes of the tensors that each stage receives.
            sent_back: Bytes of the gradients that each stage sends back.
        """
        kind, stage, _ = action
        if kind == "W":
            return
        tensors, step = (received, 1) if kind == "F" else (sent_back, -1)
        for other, is_received in ((stage - step, True), (stage + step, False)):
            if not 0 <= other < len(received) or (rank := self._program.rank_of(other)) == self._rank:
                continue
            ends = self.ranks()[0], self.peer(rank)
            for nbytes in tensors[max(stage, other)]:
                yield CollectiveRecord("send", nbytes, ends[::-1] if is_received else ends)

    def ties(self) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
        """Yield the trained parameters that this rank shares with others along ``pp``, each with all of these ranks."""
        named = dict(self._program.module.named_parameters(remove_duplicate=False))
        for tie in self._program.ties if len(self._program.stages) > 1 else ():
            ranks = tuple(sorted({self._program.rank_of(stage) for stage in tie.stages}))
            parameter = named[tie.names[0]]
            if self._rank in ranks and len(ranks) > 1 and parameter.requires_grad:
                yield parameter, ranks


def boundary_bytes(stages: Sequence[Stage]) -> tuple[MessageSizes, MessageSizes]:
    """Return the bytes of the tensors that each stage receives, and of the gradients that it sends back, one message each."""
    sizes = [[(each, torch.Size(each.shape).numel() * each.dtype.itemsize) for each in stage.inputs] for stage in stages]
    received = [[nbytes for _, nbytes in stage] for stage in sizes]
    return received, [[nbytes for each, nbytes in stage if each.requires_grad] for stage in sizes]
