"""Stages of a layout: their blocks, the least recomputation with which they fit, and their seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..records import CollectiveRecord
from .engine_facts import EngineFacts
from .layouts import Layout
from .model_record import ModelRecord, Part, StageEnds
from .part_seconds import PartSeconds
from .recomputation import BlockOptions, greedy_policies, least_policies
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


def seconds_after(stages: Iterable[StageCost]) -> float:
    """Return the seconds of reduction and optimizer on the slowest rank, which may have several stages."""
    ranks: dict[int, float] = defaultdict(float)
    for each in stages:
        ranks[each.rank] += each.after
    return max(ranks.values())


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
    record: ModelRecord,
    layout: Layout,
    facts: EngineFacts,
    seconds: PartSeconds,
    *,
    growth: float = 1.0,
    solves: bool = False,
    policy: str = "",
) -> list[StageCost]:
    """Return the stages of a layout, each rank with the least recomputation that fits.

    Args:
        record: The model for ``layout.rows`` rows and ``layout.tp`` ranks.
        layout: The layout.
        facts: What the engine tells of its step.
        seconds: Seconds on the device, whose usable memory is the limit.
        growth: Ratio of the memory of a real schedule to that of its parts.
        solves: True to solve for the checkpoint policies; False for those of a greedy order, which is near and faster.
        policy: Checkpoint policy of all blocks, whether it fits or not; empty for the least recomputation that fits.
    """
    stages = sum(map(len, facts.stages.values()))
    counts = split_blocks(record, stages, seconds) if stages > 1 else [len(record.paths)]
    begins = [sum(counts[:index]) for index in range(stages + 1)]
    found: dict[int, StageCost] = {}
    for rank, own in facts.stages.items():
        blocks = [range(begins[stage], begins[stage + 1]) for stage in own]
        found |= _Rank(record, layout, facts, seconds, growth, rank, blocks).costs(solves, policy)
    return [found[stage] for stage in range(stages)]


class _Rank:
    """One rank along ``pp`` with the blocks of each of its stages."""

    def __init__(
        self,
        record: ModelRecord,
        layout: Layout,
        facts: EngineFacts,
        seconds: PartSeconds,
        growth: float,
        rank: int,
        blocks: Sequence[range],
    ) -> None:
        self.record, self.layout, self.facts, self.seconds = record, layout, facts, seconds
        self.growth, self.rank, self.stages, self.blocks = growth, rank, facts.stages[rank], blocks
        self.replicas = Replicas(layout.dp, facts.divided, gathers_blocks=layout.pp == 1)
        last = sum(map(len, facts.stages.values())) - 1
        self.ends = [self._ends(stage, last) for stage in self.stages]
        held = {0, last} & {*self.stages} if last else set()
        self.tied, self.shared = (record.tied if len(held) == number else 0 for number in (2, 1))

    def _ends(self, stage: int, last: int) -> StageEnds:
        """Return the ends of a stage; to another stage of this rank it sends nothing."""
        record = self.record
        found = record.first if stage == 0 else record.last if stage == last else record.middle
        if stage + 1 in self.stages:
            found = replace(found, sent=0)
        return replace(found, sent_back=0) if stage - 1 in self.stages else found

    def costs(self, solves: bool, policy: str) -> dict[int, StageCost]:
        """Return the cost of each stage; arguments as in ``stage_costs``."""
        if policy:
            policies = dict.fromkeys((block for blocks in self.blocks for block in blocks), policy)
            peak = self._peak(policies)
        else:
            policies, peak = self._least_recomputation(solves)
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

    def _least_recomputation(self, solves: bool) -> tuple[dict[int, str], int]:
        limit, options = self.seconds.hardware.usable_bytes, self._options()
        found = greedy_policies(options, self._peak, limit)
        return least_policies(options, self._peak, limit, found) if solves else found

    def _options(self) -> list[BlockOptions]:
        """Return the blocks of each stage with their policies; equal ones together."""
        found = []
        states = self.facts.states[self.rank]
        for index, blocks in enumerate(self.blocks):
            most = max((state.kept[index] for state in states), default=1)
            equal: dict[tuple[int, ...], list[int]] = {}
            for block in blocks:
                equal.setdefault(tuple(id(parts[block]) for parts in self.record.blocks.values()), []).append(block)
            for own in equal.values():
                parts = [each[own[0]] for each in self.record.blocks.values()]
                kept = tuple(most * part.forward.change for part in parts)
                found.append(BlockOptions(tuple(own), tuple(self.record.blocks), tuple(map(self._cost, parts)), kept))
        return found

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
        found = peak_bytes(sizes, states, facts.rules, self.replicas, microbatches, record.batch, self.tied, self.shared)
        return round(self.growth * found)

    def _with_replicas(self, forward: float, backward: float, parts: Sequence[Part]) -> tuple[float, float, float]:
        """Return seconds of forward, backward and the rest of the step, with the messages between replicas."""
        layout, divided = self.layout, self.facts.divided
        optimizer = sum(self.seconds(each.optimizer) for each in parts)
        if layout.dp == 1:
            return forward, backward, optimizer
        ranks = tuple(range(0, layout.dp * layout.tp, layout.tp))

        def collective(kind: str, nbytes: int) -> float:
            return self.seconds.collective(CollectiveRecord(kind, nbytes, ranks))

        def collectives(kind: str, sizes: Sequence[int]) -> float:
            return sum(times * collective(kind, nbytes) for nbytes, times in Counter(sizes).items() if nbytes)

        gradients, parameters = sum(each.gradients for each in parts), sum(each.parameters for each in parts)
        if "optimizer" in divided:
            optimizer /= layout.dp
        if "parameters" in divided:
            once = [parts[0], parts[-1]] if self.replicas.gathers_blocks else [*parts]
            running = parts[1:-1] if self.replicas.gathers_blocks else []
            optimizer += collectives("all_gather", [each.parameters for each in once])
            optimizer += collectives("reduce_scatter", [each.gradients for each in once])
            gather = collectives("all_gather", [each.parameters for each in running])
            reduce = collectives("reduce_scatter", [each.gradients for each in running])
            code = self.seconds.hardware.unit_seconds
            forward += code * sum(each.parameters > 0 for each in running)
            backward += code * sum((each.parameters > 0) + (each.gradients > 0) for each in running)
            if not self.seconds.hardware.overlaps:
                return forward + gather, backward + gather + reduce, optimizer
            return max(forward, gather), max(backward, gather) + reduce, optimizer
        if divided:  # a reduce-scatter of gradients and a gather of what the optimizer has stepped
            optimizer += collective("all_gather", parameters)
            reduction = collective("reduce_scatter" if "gradients" in divided else "all_reduce", gradients)
        else:
            reduction = collective("all_reduce", gradients)
        hidden = backward if self.facts.overlaps and self.seconds.hardware.overlaps else 0.0
        return forward, backward, optimizer + max(reduction - hidden, 0.1 * reduction)
