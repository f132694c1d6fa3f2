"""Collectives and messages of a step of target ``torch`` beside those in the model, computed from sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training import CollectiveRecord, GradientSize, PipelineAction, StepFacts

from .fsdp.wrap_policy import assign_parameters, can_shard, unit_paths
from .gradients.reduction import BUCKET_BYTES
from .options import Options
from .pipelining.schedules import kind_of

_FIRST_BUCKET_BYTES = 2**20
"""Size at which the first bucket of ``DistributedDataParallel`` is full."""

_FACTS_OF_BATCH, _FACTS_OF_LOSS = 10, 12
"""Numbers that ranks compare before a step, without slots of replicas, and after its backwards."""


class StepCollectives:
    """Collectives of one rank along ``pp`` in a step that is not the first.

    Args:
        program: The program.
        options: Options of the engine.
        rank: Rank along ``pp``; coordinates along the other axes are those of this process.
        facts: What the run of the rank's stages has shown.
    """

    def __init__(self, program: Program, options: Options, rank: int, facts: StepFacts) -> None:
        self._program, self._options, self._rank, self._facts = program, options, rank, facts
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
        yield from self._on_all_ranks(8 * (_FACTS_OF_BATCH + (4 * self._replicas if staged else 0)))
        for action in self._facts.actions:
            yield from self._messages(action)
        if self._is_sharded:
            yield from self._units()
        elif self._replicas > 1 and not self._averages_afterwards and self._trained:
            for size in ddp_buckets(self._facts.arrivals):
                yield self._reduction("dp", size, overlapped=True)
        yield from self._on_all_ranks(8 * _FACTS_OF_LOSS)
        if self._is_sharded and self._facts.unused:
            yield self._reduction("dp", 4 * sum(each.requires_grad for each in self._sharded_parameters()))
        if self._is_sharded:
            sharded = {id(each) for each in self._sharded_parameters()}
            yield from self._averages([each for each in self._trained if id(each) not in sharded])
        if self._options.precision == "fp16":
            yield from self._on_all_ranks(8)
        if self._averages_afterwards:
            yield from self._averages(self._trained)
        elif self._replicas > 1 and not self._is_sharded and self._facts.unused and self._trained:
            yield self._reduction("dp", 4 * len(self._trained))
        yield from self._ties()
        if self._options.clip:
            yield from self._norms()
        yield from self._on_all_ranks(8)  # errors of the optimizer's step

    # ---- groups

    def _ranks(self, axis: str, pipeline_rank: int | None = None) -> tuple[int, ...]:
        """Return the global ranks along an axis through this rank; with ``pipeline_rank``, through that rank along ``pp``."""
        mesh = self._program.mesh
        assert mesh is not None
        names = mesh.mesh_dim_names or ()
        place: list[int | slice] = [self._program.axis_rank(name) for name in names]
        if "pp" in names:
            place[names.index("pp")] = self._rank if pipeline_rank is None else pipeline_rank
        place[names.index(axis)] = slice(None) if pipeline_rank is None else place[names.index(axis)]
        found = mesh.mesh[tuple(place)]
        return tuple(found.reshape(-1).tolist())

    def _global_rank(self, pipeline_rank: int) -> int:
        return self._ranks("pp", pipeline_rank)[0]

    def _reduction(self, axis: str, nbytes: int, overlapped: bool = False) -> CollectiveRecord:
        return CollectiveRecord("all_reduce", nbytes, self._ranks(axis), overlapped)

    def _on_all_ranks(self, nbytes: int) -> Iterator[CollectiveRecord]:
        mesh = self._program.mesh
        for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
            if self._program.axis_size(axis) > 1:
                yield self._reduction(axis, nbytes)

    # ---- parts of a step

    def _messages(self, action: PipelineAction) -> Iterator[CollectiveRecord]:
        """Yield the messages before and after a computation; stages of one rank pass tensors on without."""
        kind, stage, _ = action
        if kind == "W" or len(self._program.stages) == 1:
            return
        stages, own = self._facts.stages, self._global_rank(self._rank)
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        for other, is_received in ((before, True), (after, False)):
            if not 0 <= other < len(stages) or (rank := self._program.rank_of(other)) == self._rank:
                continue
            crossing = stages[max(stage, other)].inputs
            ends = (self._global_rank(rank), own) if is_received else (own, self._global_rank(rank))
            for each in crossing:
                if kind == "F" or each.requires_grad:
                    size = torch.Size(each.shape).numel() * each.dtype.itemsize
                    yield CollectiveRecord("send", size, ends)

    def _sharded_parameters(self) -> list[nn.Parameter]:
        return [each for each in self._parameters if can_shard(each)]

    def _units(self) -> Iterator[CollectiveRecord]:
        """Yield gathers and reductions of FSDP; a unit that runs is gathered for its forward and for its backward."""
        microbatches = sum(kind == "F" and stage == self._own[0] for kind, stage, _ in self._facts.actions)
        patterns, module = self._options.fsdp_units, self._program.module
        assigned = assign_parameters(module, unit_paths(module, patterns), {id(each) for each in self._parameters})
        for path, parameters in assigned.items():
            runs = bool(path) and not self._facts.gathers_all and len(self._program.stages) == 1
            by_type: dict[torch.dtype, list[nn.Parameter]] = {}
            for each in filter(can_shard, parameters):
                by_type.setdefault(each.dtype, []).append(each)
            for some in by_type.values():
                whole, trained = self._padded_bytes(some), self._padded_bytes(each for each in some if each.requires_grad)
                times = microbatches if runs else 1
                for _ in range(2 * times if runs else 1):
                    yield CollectiveRecord("all_gather", whole, self._ranks("dp"), runs)
                for _ in range(times if trained else 0):
                    yield CollectiveRecord("reduce_scatter", trained, self._ranks("dp"))

    def _padded_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        rows = ((each, -(-each.shape[0] // self._replicas) * self._replicas) for each in parameters)
        return sum(count * each[0].numel() * each.element_size() for each, count in rows)

    def _averages(self, parameters: Sequence[nn.Parameter]) -> Iterator[CollectiveRecord]:
        """Yield the buckets of ``average_gradients``, which have one more number per parameter."""
        for bucket in _buckets(parameters):
            yield self._reduction("dp", sum((each.numel() + 1) * each.element_size() for each in bucket))

    def _ties(self) -> Iterator[CollectiveRecord]:
        named = dict(self._program.module.named_parameters(remove_duplicate=False))
        shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for tie in self._program.ties if len(self._program.stages) > 1 else ():
            ranks = tuple(sorted({self._program.rank_of(stage) for stage in tie.stages}))
            parameter = named[tie.names[0]]
            if self._rank in ranks and len(ranks) > 1 and parameter.requires_grad:
                shared.setdefault(ranks, []).append(parameter)
        for ranks, parameters in shared.items():
            own = self._global_rank(self._rank)
            for bucket in _buckets(parameters):
                size = sum((self._kept(each) + 1) * each.element_size() for each in bucket)
                for peer in (self._global_rank(rank) for rank in ranks if rank != self._rank):
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
                found[self._stage_ranks()] += 1
            elif is_sharded:
                found[self._ranks("dp")] += 1
            elif spec is not None and spec.group is not None:
                found[self._ranks("tp")] += 1
        for ranks in found:
            yield CollectiveRecord("all_reduce", 8, ranks)
        if self._program.axis_size("pp") > 1:
            yield self._reduction("pp", 8)

    def _stage_ranks(self) -> tuple[int, ...]:
        mesh = self._program.mesh
        assert mesh is not None
        names = mesh.mesh_dim_names or ()
        return tuple((mesh.mesh.select(names.index("pp"), self._rank) if "pp" in names else mesh.mesh).reshape(-1).tolist())


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
