"""Collectives and messages of a step of target ``torch`` beside those in the model, computed from sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training import CollectiveRecord, GradientSize, StepFacts, StepGroups, boundary_bytes

from .fsdp.wrap_policy import can_shard
from .gradients.reduction import BUCKET_BYTES
from .options import Options
from .pipelining.schedules import kind_of

_FIRST_BUCKET_BYTES = 2**20
"""Size at which the first bucket of ``DistributedDataParallel`` is full."""

_FACTS_OF_BATCH, _FACTS_OF_LOSS = 10, 12
"""Numbers that ranks compare before a step, without slots of replicas, and after its backwards."""


class StepCollectives:
    """Collectives of one rank along ``pp`` in a step that is not the first; those of FSDP units run with the stages.

    Args:
        program: The program.
        options: Options of the engine.
        rank: Rank along ``pp``; coordinates along the other axes are those of this process.
        facts: What the run of the rank's stages has shown.
    """

    def __init__(self, program: Program, options: Options, rank: int, facts: StepFacts) -> None:
        self._program, self._options, self._facts = program, options, facts
        self._groups = StepGroups(program, rank)
        self._own = [stage.index for stage in program.stages if program.rank_of(stage.index) == rank]
        modules = [program.stages[index].module for index in self._own]
        self._parameters = [*{id(each): each for module in modules for each in module.parameters()}.values()]
        self._trained = [each for each in self._parameters if each.requires_grad]
        self._replicas = program.axis_size("dp")
        several = len(program.stages) > 1 and kind_of(options.pipeline_schedule).stages_per_rank != 1
        self._is_sharded = self._replicas > 1 and options.data_parallel == "fsdp"
        self._averages_afterwards = self._replicas > 1 and not self._is_sharded and several

    def records(self) -> Iterator[CollectiveRecord]:
        """Yield the records in the order of the step."""
        staged = self._program.axis_size("pp") * self._program.axis_size("tp") > 1
        received, sent_back = boundary_bytes(self._facts.stages)
        yield from self._groups.on_all_ranks(8 * (_FACTS_OF_BATCH + (4 * self._replicas if staged else 0)))
        if self._repeats_forward:
            for action in self._facts.actions:
                if action.kind == "F":
                    yield from self._groups.messages(action, received, sent_back)
            yield from self._groups.on_all_ranks(8 * _FACTS_OF_LOSS)
            yield from self._groups.on_all_ranks(8)  # errors of the loss of all replicas
        for action in self._facts.actions:
            yield from self._groups.messages(action, received, sent_back)
        if self._replicas > 1 and not self._is_sharded and not self._averages_afterwards and self._trained:
            for size in ddp_buckets(self._facts.arrivals):
                yield self._groups.all_reduce("dp", size, overlapped=True)
        yield from self._groups.on_all_ranks(8 * _FACTS_OF_LOSS)
        if self._is_sharded and self._facts.unused:
            yield self._groups.all_reduce("dp", 4 * sum(each.requires_grad for each in self._sharded_parameters()))
        if self._is_sharded:
            sharded = {id(each) for each in self._sharded_parameters()}
            yield from self._averages([each for each in self._trained if id(each) not in sharded])
        if self._options.precision == "fp16":
            yield from self._groups.on_all_ranks(8)
        if self._averages_afterwards:
            yield from self._averages(self._trained)
        elif self._replicas > 1 and not self._is_sharded and self._facts.unused and self._trained:
            yield self._groups.all_reduce("dp", 4 * len(self._trained))
        yield from self._ties()
        if self._options.clip:
            yield from self._norms()
        yield from self._groups.on_all_ranks(8)  # errors of the optimizer's step

    # ---- parts of a step

    @property
    def _repeats_forward(self) -> bool:
        """True if all micro-batches run forward once before, for the loss of all replicas."""
        several = any(each.microbatch for each in self._facts.actions)
        return self._options.loss_over is not None and several

    def _sharded_parameters(self) -> list[nn.Parameter]:
        return [each for each in self._parameters if can_shard(each)]

    def _averages(self, parameters: Sequence[nn.Parameter]) -> Iterator[CollectiveRecord]:
        """Yield the buckets of ``average_gradients``, which have one more number per parameter."""
        for bucket in _buckets(parameters):
            yield self._groups.all_reduce("dp", sum((each.numel() + 1) * each.element_size() for each in bucket))

    def _ties(self) -> Iterator[CollectiveRecord]:
        shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter, ranks in self._groups.ties():
            shared.setdefault(ranks, []).append(parameter)
        own = self._groups.ranks()[0]
        for ranks, parameters in shared.items():
            for bucket in _buckets(parameters):
                size = sum((self._kept(each) + 1) * each.element_size() for each in bucket)
                for peer in (each for each in map(self._groups.peer, ranks) if each != own):
                    yield CollectiveRecord("send", size, (own, peer))
                    yield CollectiveRecord("send", size, (peer, own))

    def _kept(self, parameter: nn.Parameter) -> int:
        """Return the number of elements that this rank keeps between steps."""
        if not self._is_sharded or not can_shard(parameter):
            return parameter.numel()
        return -(-parameter.shape[0] // self._replicas) * parameter[0].numel()

    def _norms(self) -> Iterator[CollectiveRecord]:
        """Yield the reductions of the norm: over each group of shards, then over stages."""
        found: Counter[tuple[int, ...]] = Counter()
        for each in self._trained:
            spec, is_sharded = shard_spec(each), self._is_sharded and can_shard(each)
            has_parts = spec is not None and spec.num_shards > 1
            if has_parts and is_sharded:
                found[self._groups.ranks("dp", "tp")] += 1
            elif is_sharded:
                found[self._groups.ranks("dp")] += 1
            elif spec is not None and spec.group is not None:
                found[self._groups.ranks("tp")] += 1
        for ranks in found:
            yield CollectiveRecord("all_reduce", 8, ranks)
        if self._program.axis_size("pp") > 1:
            yield self._groups.all_reduce("pp", 8)


def ddp_buckets(arrivals: Sequence[GradientSize]) -> list[int]:
    """Return the bytes of the buckets of ``DistributedDataParallel`` after its first step.

    Args:
        arrivals: Gradients in the order of the backward, in which torch builds the buckets again after the first one.
    """
    full: list[int] = []
    sizes: Counter[torch.dtype] = Counter()
    limits: dict[torch.dtype, int] = {}
    for each in arrivals:
        sizes[each.dtype] += each.nbytes
        if sizes[each.dtype] >= limits.get(each.dtype, _FIRST_BUCKET_BYTES):
            full.append(sizes.pop(each.dtype))
            limits[each.dtype] = BUCKET_BYTES
    return [*full, *(size for size in sizes.values() if size)]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield buckets as ``average_gradients`` makes them."""
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for each in parameters:
        bucket = filling.setdefault(each.dtype, [])
        bucket.append(each)
        if sum(held.numel() * held.element_size() for held in bucket) >= BUCKET_BYTES:
            yield filling.pop(each.dtype)
    yield from filling.values()
