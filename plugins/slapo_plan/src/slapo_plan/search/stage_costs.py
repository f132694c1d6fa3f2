"""Memory and seconds of pipeline stages, put together from the parts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..hardware import Hardware, collective_seconds, work_seconds
from ..recording.segments import PassRecord
from ..records import CollectiveRecord
from .layouts import Layout
from .model_record import ModelRecord, Part, flops_of


@dataclass(frozen=True)
class StageCost:
    """One stage on one rank.

    Args:
        blocks: Number of its blocks.
        checkpointed: Number of its blocks that are recomputed, the first ones.
        peak: Most bytes in a step.
        forward: Seconds of a forward.
        backward: Seconds of a backward, with recomputation.
        after: Seconds of gradient reduction that no backward hides, and of the optimizer.
    """

    blocks: int
    checkpointed: int
    peak: int
    forward: float
    backward: float
    after: float


class PartSeconds:
    """Seconds of the passes of parts on a device; each is computed once."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._known: dict[int, tuple[PassRecord, float]] = {}
        self._gathered: dict[tuple[int, int, int], tuple[Any, tuple[PassRecord, PassRecord]]] = {}
        self._flops: dict[int, int] = {}
        self._collectives: dict[CollectiveRecord, float] = {}
        self._recomputed: dict[int, tuple[Part, PassRecord, PassRecord]] = {}

    def __call__(self, record: PassRecord) -> float:
        if id(record) not in self._known:
            found = work_seconds(record.work, self.hardware)
            self._known[id(record)] = record, found.compute + found.communication + max(0.0, found.overlapped - found.compute)
        return self._known[id(record)][1]

    def gathered_passes(self, forward: PassRecord, backward: PassRecord, part: Part) -> tuple[PassRecord, PassRecord]:
        """Return the passes of a block that FSDP gathers as it runs: the next one's parameters are gathered meanwhile.

        In the backward its whole gradients are there, too, and the buffer in which they are sent.
        """
        key = id(forward), id(backward), id(part)
        if key not in self._gathered:
            extra = 2 * part.parameters
            made = replace(forward, peak=forward.peak + extra), replace(backward, peak=backward.peak + 2 * extra)
            self._gathered[key] = (forward, backward, part), made
        return self._gathered[key][1]

    def flops(self, record: ModelRecord) -> int:
        """Return the floating-point operations of forward and backward of one micro-batch on one rank of each stage."""
        if id(record) not in self._flops:
            known = {id(each): flops_of(each.forward) + flops_of(each.backward) for each in (record.before, record.behind)}
            known |= {id(each): flops_of(each.forward) + flops_of(each.backward) for each in dict.fromkeys(record.blocks)}
            self._flops[id(record)] = sum(known[id(each)] for each in (record.before, *record.blocks, record.behind))
        return self._flops[id(record)]

    def collective(self, record: CollectiveRecord) -> float:
        """Return the seconds of a collective."""
        if record not in self._collectives:
            self._collectives[record] = collective_seconds(record, self.hardware)
        return self._collectives[record]

    def recomputed_passes(self, part: Part) -> tuple[PassRecord, PassRecord]:
        """Return forward and backward of a block that keeps its output alone; the same objects for equal blocks."""
        if id(part) not in self._recomputed:
            forward, backward = part.forward, part.backward
            peak = max(forward.peak, forward.change + backward.peak)
            kept = PassRecord(forward.peak, part.output)
            self._recomputed[id(part)] = part, kept, PassRecord(peak, forward.change + backward.change - part.output)
        return self._recomputed[id(part)][1:]


def split_blocks(record: ModelRecord, stages: int, seconds: PartSeconds) -> list[int]:
    """Return the number of blocks of each stage, so that the slowest stage is fast; each stage has at least one."""
    extra = [0.0] * stages
    extra[0] += seconds(record.before.forward) + seconds(record.before.backward)
    extra[-1] += seconds(record.behind.forward) + seconds(record.behind.backward)
    total = sum(seconds(each.forward) + seconds(each.backward) for each in record.blocks)
    block = total / max(1, len(record.blocks))
    counts = [1] * stages
    for _ in range(len(record.blocks) - stages):
        stage = min(range(stages), key=lambda index: extra[index] + (counts[index] + 1) * block)
        counts[stage] += 1
    return counts


def stage_costs(record: ModelRecord, layout: Layout, seconds: PartSeconds) -> list[StageCost]:
    """Return the stages of a layout, each with the least recomputation that fits.

    Args:
        record: The model for ``layout.rows`` rows and ``layout.tp`` ranks.
        layout: The layout.
        seconds: Seconds on the device, whose usable memory is the limit.
    """
    counts = split_blocks(record, layout.pp, seconds) if layout.pp > 1 else [len(record.blocks)]
    found, begin = [], 0
    for index, count in enumerate(counts):
        parts = record.blocks[begin : begin + count]
        stage = _Stage(record, parts, index, layout, seconds)
        found.append(stage.cost(stage.least_checkpointed(seconds.hardware.usable_bytes)))
        begin += count
    return found


class _Stage:
    def __init__(self, record: ModelRecord, blocks: Sequence[Part], index: int, layout: Layout, seconds: PartSeconds) -> None:
        self.layout, self.seconds, self.index = layout, seconds, index
        self.is_first, self.is_last = index == 0, index == layout.pp - 1
        self.before = [record.before] if self.is_first else []
        self.behind = [record.behind] if self.is_last else []
        self.blocks = blocks
        parts = [*self.before, *blocks, *self.behind]
        self.parameters = sum(each.parameters for each in parts)
        self.gradients = sum(each.gradients for each in parts)
        self.state = sum(each.optimizer.change for each in parts)
        self.message = record.before.output

    def least_checkpointed(self, limit: int) -> int:
        """Return the least number of recomputed blocks whose peak is within the limit; all of them if none is."""
        low, high = 0, len(self.blocks)
        while low < high:
            middle = (low + high) // 2
            if self.peak(middle) <= limit:
                high = middle
            else:
                low = middle + 1
        return low

    def peak(self, checkpointed: int) -> int:
        layout = self.layout
        in_flight = min(layout.pp - self.index, layout.microbatches)
        forward, backward = self._passes(checkpointed)
        working = max(in_flight * forward.change + backward.peak, (in_flight - 1) * forward.change + forward.peak)
        messages = 0
        if layout.pp > 1:
            messages = layout.microbatches * self.message * (2 - self.is_first - self.is_last) + self.message
        return self._held() + messages + working

    def _held(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state at the peak."""
        layout = self.layout
        several = layout.microbatches > 1
        if layout.data_parallel == "fsdp":
            shard = (self.parameters + self.gradients + self.state) // layout.dp
            if layout.pp > 1:  # the whole stage is gathered for the whole step, and its gradients are reduced at the end
                return (self.parameters + self.state) // layout.dp + self.parameters + self.gradients
            ends = [*self.before, *self.behind]  # one unit, which is gathered for the whole step
            return shard + sum(each.parameters + each.gradients for each in ends)
        buckets = self.gradients if layout.dp > 1 else 0
        return self.parameters + self.state + buckets + (self.gradients if several or layout.pp > 1 else 0)

    def _passes(self, checkpointed: int) -> tuple[PassRecord, PassRecord]:
        """Return forward and backward of the stage, without their work."""
        plain = [(each.forward, each.backward) for each in self.blocks[checkpointed:]]
        blocks = [*map(self.seconds.recomputed_passes, self.blocks[:checkpointed]), *plain]
        if self.layout.data_parallel == "fsdp" and self.layout.pp == 1:
            blocks = [self.seconds.gathered_passes(*passes, part) for passes, part in zip(blocks, self.blocks, strict=True)]
        forwards = [each.forward for each in self.before] + [forward for forward, _ in blocks]
        backwards = [each.backward for each in self.behind] + [backward for _, backward in reversed(blocks)]
        forwards += [each.forward for each in self.behind]
        backwards += [each.backward for each in self.before]
        return _join(forwards), _join(backwards)

    def cost(self, checkpointed: int) -> StageCost:
        parts = [*self.before, *self.blocks, *self.behind]
        forward = sum(self.seconds(each.forward) for each in parts)
        backward = sum(self.seconds(each.backward) for each in parts)
        backward += sum(self.seconds(each.forward) for each in self.blocks[:checkpointed])
        peak = self.peak(checkpointed)
        return StageCost(len(self.blocks), checkpointed, peak, *self._with_replicas(forward, backward, parts))

    def _with_replicas(self, forward: float, backward: float, parts: Sequence[Part]) -> tuple[float, float, float]:
        """Return seconds of forward, backward and the rest of the step, with the messages between replicas."""
        layout = self.layout
        optimizer = sum(self.seconds(each.optimizer) for each in parts)
        if layout.dp == 1:
            return forward, backward, optimizer
        ranks = tuple(range(0, layout.dp * layout.tp, layout.tp))

        def collective(kind: str, nbytes: int) -> float:
            return self.seconds.collective(CollectiveRecord(kind, nbytes, ranks))

        if layout.data_parallel == "ddp":
            reduction = collective("all_reduce", self.gradients)
            return forward, backward, optimizer + max(reduction - backward, 0.1 * reduction)
        gather, reduce = collective("all_gather", self.parameters), collective("reduce_scatter", self.gradients)
        if layout.pp > 1:
            return forward, backward, optimizer / layout.dp + gather + reduce
        return max(forward, gather), max(backward, gather + reduce), optimizer / layout.dp


def _join(records: Sequence[PassRecord]) -> PassRecord:
    """Join passes; a run of equal ones peaks in its first or its last."""
    peak = change = 0
    for _, run in groupby(records, key=id):
        equal = [*run]
        last = change + (len(equal) - 1) * equal[0].change
        peak = max(peak, change + equal[0].peak, last + equal[0].peak)
        change = last + equal[0].change
    return PassRecord(peak, change)
