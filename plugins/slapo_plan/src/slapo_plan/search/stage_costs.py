"""Stages of a layout: their blocks, the least recomputation with which they fit, and their seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..records import CollectiveRecord
from .engine_facts import EngineFacts
from .layouts import Layout
from .model_record import ModelRecord, Part, StageEnds
from .part_seconds import PartSeconds
from .stage_memory import Replicas, Run, StageSizes, peak_bytes


@dataclass(frozen=True)
class StageCost:
    """One stage on one rank.

    Args:
        rank: Its rank along ``pp``.
        policies: Checkpoint policy of each of its blocks; ``"none"`` keeps everything.
        peak: Most bytes of the rank in a step.
        forward: Seconds of a forward.
        backward: Seconds of a backward, with recomputation.
        after: Seconds of gradient reduction that no backward hides, and of the optimizer.
    """

    rank: int
    policies: tuple[str, ...]
    peak: int
    forward: float
    backward: float
    after: float

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return len(self.policies)

    @property
    def num_checkpointed(self) -> int:
        """Number of its blocks that are recomputed in part or whole."""
        return sum(each != "none" for each in self.policies)


def split_blocks(record: ModelRecord, stages: int, seconds: PartSeconds) -> list[int]:
    """Return the number of blocks of each stage, so that the slowest stage is fast; each stage has at least one."""
    extra = [0.0] * stages
    extra[0] += _both(record.first.entry, seconds)
    extra[-1] += _both(record.last.exit, seconds)
    blocks = record.blocks["none"]
    block = sum(_both(each, seconds) for each in blocks) / max(1, len(blocks))
    counts = [1] * stages
    for _ in range(len(blocks) - stages):
        stage = min(range(stages), key=lambda index: extra[index] + (counts[index] + 1) * block)
        counts[stage] += 1
    return counts


def _both(part: Part, seconds: PartSeconds) -> float:
    return seconds(part.forward) + seconds(part.next_backward)


def stage_costs(
    record: ModelRecord, layout: Layout, facts: EngineFacts, seconds: PartSeconds, policy: str = ""
) -> list[StageCost]:
    """Return the stages of a layout, each rank with the least recomputation that fits.

    Args:
        record: The model for ``layout.rows`` rows and ``layout.tp`` ranks.
        layout: The layout.
        facts: What the engine tells of its step.
        seconds: Seconds on the device, whose usable memory is the limit.
        policy: Checkpoint policy of all blocks, whether it fits or not; empty for the least recomputation.
    """
    stages = sum(map(len, facts.stages.values()))
    counts = split_blocks(record, stages, seconds) if stages > 1 else [len(record.paths)]
    begins = [sum(counts[:index]) for index in range(stages + 1)]
    found: dict[int, StageCost] = {}
    for rank, own in facts.stages.items():
        blocks = [range(begins[stage], begins[stage + 1]) for stage in own]
        found |= _Rank(record, layout, facts, seconds, rank, blocks).costs(policy)
    return [found[stage] for stage in range(stages)]


class _Rank:
    """One rank along ``pp`` with the blocks of each of its stages."""

    def __init__(
        self,
        record: ModelRecord,
        layout: Layout,
        facts: EngineFacts,
        seconds: PartSeconds,
        rank: int,
        blocks: Sequence[range],
    ) -> None:
        self.record, self.layout, self.facts, self.seconds = record, layout, facts, seconds
        self.rank, self.stages, self.blocks = rank, facts.stages[rank], blocks
        self.replicas = Replicas(layout.dp, facts.divided, gathers_blocks=layout.pp == 1)
        last = sum(map(len, facts.stages.values())) - 1
        self.ends = [self._ends(stage, last) for stage in self.stages]
        self.tied = record.tied if {0, last} <= {*self.stages} and last else 0

    def _ends(self, stage: int, last: int) -> StageEnds:
        """Return the ends of a stage; to another stage of this rank it sends nothing."""
        record = self.record
        found = record.first if stage == 0 else record.last if stage == last else record.middle
        if stage + 1 in self.stages:
            found = replace(found, sent=0)
        return replace(found, sent_back=0) if stage - 1 in self.stages else found

    def costs(self, policy: str = "") -> dict[int, StageCost]:
        """Return the cost of each stage, with the least recomputation that fits or one policy for all blocks."""
        if policy:
            policies = dict.fromkeys((block for blocks in self.blocks for block in blocks), policy)
            peak = self._peak(policies)
        else:
            policies, peak = self._least_recomputation(self.seconds.hardware.usable_bytes)
        found = {}
        for stage, ends, blocks in zip(self.stages, self.ends, self.blocks, strict=True):
            own = [policies[block] for block in blocks]
            parts = [ends.entry, *(self._part(block, policies) for block in blocks), ends.exit]
            forward = sum(self.seconds(each.forward) for each in parts)
            backward = sum(self.seconds(each.next_backward) for each in parts)
            found[stage] = StageCost(self.rank, tuple(own), peak, *self._with_replicas(forward, backward, parts))
        return found

    def _part(self, block: int, policies: Mapping[int, str]) -> Part:
        return self.record.blocks[policies[block]][block]

    def _least_recomputation(self, limit: int) -> tuple[dict[int, str], int]:
        """Return the policy of each block and the peak; with the most recomputation if nothing fits."""
        policies = dict.fromkeys((block for blocks in self.blocks for block in blocks), "none")
        if (peak := self._peak(policies)) <= limit:
            return policies, peak
        changes = self._changes()
        low, high = 0, len(changes)
        while low < high:
            middle = (low + high) // 2
            if self._peak({**policies, **dict(changes[:middle])}) <= limit:
                high = middle
            else:
                low = middle + 1
        policies |= dict(changes[:low])
        return policies, self._peak(policies)

    def _changes(self) -> list[tuple[int, str]]:
        """Return changes of one block's policy, those first that free the most bytes for a second of recomputation.

        The policies of a block are those on the upper hull of its freed bytes over seconds, so that a prefix of the changes is
        the least recomputation for what it frees.
        """
        found = []
        most = [
            max((state.kept[index] for state in self.facts.states[self.rank]), default=1) for index in range(len(self.stages))
        ]
        for blocks, times in zip(self.blocks, most, strict=True):
            for place, block in enumerate(blocks):
                options = [
                    (name, self._cost(parts[block]), times * parts[block].forward.change)
                    for name, parts in self.record.blocks.items()
                ]
                found += [(-rate, place, block, name) for name, rate in _upper_hull(options)]
        return [(block, name) for _, _, block, name in sorted(found)]

    def _cost(self, part: Part) -> float:
        return self.seconds(part.forward) + self.seconds(part.next_backward)

    def _peak(self, policies: Mapping[int, str]) -> int:
        sizes = []
        for ends, blocks in zip(self.ends, self.blocks, strict=True):
            parts = [self._part(block, policies) for block in blocks]
            runs: list[Run] = [(own[0], len(own)) for _, equal in groupby(parts, key=id) if (own := [*equal])]
            sizes.append(StageSizes.of(ends, runs, self.replicas))
        record, facts = self.record, self.facts
        states, microbatches = facts.states[self.rank], self.layout.microbatches
        return peak_bytes(sizes, states, facts.rules, self.replicas, microbatches, record.batch, self.tied)

    def _with_replicas(self, forward: float, backward: float, parts: Sequence[Part]) -> tuple[float, float, float]:
        """Return seconds of forward, backward and the rest of the step, with the messages between replicas."""
        layout, divided = self.layout, self.facts.divided
        optimizer = sum(self.seconds(each.optimizer) for each in parts)
        if layout.dp == 1:
            return forward, backward, optimizer
        ranks = tuple(range(0, layout.dp * layout.tp, layout.tp))

        def collective(kind: str, nbytes: int) -> float:
            return self.seconds.collective(CollectiveRecord(kind, nbytes, ranks))

        gradients, parameters = sum(each.gradients for each in parts), sum(each.parameters for each in parts)
        if "optimizer" in divided:
            optimizer /= layout.dp
        if "parameters" in divided:
            gather, reduce = collective("all_gather", parameters), collective("reduce_scatter", gradients)
            if not self.replicas.gathers_blocks:
                return forward, backward, optimizer + gather + reduce
            return max(forward, gather), max(backward, gather + reduce), optimizer
        if divided:  # a reduce-scatter of gradients and a gather of what the optimizer has stepped
            optimizer += collective("all_gather", parameters)
            reduction = collective("reduce_scatter" if "gradients" in divided else "all_reduce", gradients)
        else:
            reduction = collective("all_reduce", gradients)
        hidden = backward if self.facts.overlaps and self.seconds.hardware.overlaps else 0.0
        return forward, backward, optimizer + max(reduction - hidden, 0.1 * reduction)


def _upper_hull(options: Sequence[tuple[str, float, int]]) -> list[tuple[str, Any]]:
    """Return the policies worth taking, each with the bytes that it frees beyond the one before for each further second.

    Args:
        options: Name, seconds and kept bytes of each policy, from the one that recomputes least.
    """
    _, seconds, kept = options[0]
    found: list[tuple[str, float]] = []
    rest = [*options[1:]]
    while rest:
        rated = [(_rate(kept - each[2], each[1] - seconds), each) for each in rest if each[2] < kept]
        if not rated:
            break
        rate, best = max(rated, key=lambda item: item[0])
        found.append((best[0], rate))
        _, seconds, kept = best
        rest = rest[rest.index(best) + 1 :]
    return found


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else float("inf")
