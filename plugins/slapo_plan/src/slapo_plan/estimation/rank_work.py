"""Operations and collectives of one rank in a step: the work of its actions, each pass read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from slapo_core import Program
from slapo_training import PipelineAction

from ..measurement.stage_record import StageRecord
from ..recording.segments import PassRecord
from ..records import CollectiveRecord, OperatorRecord, Work


def rank_flops(records: Mapping[int, StageRecord], order: Sequence[PipelineAction]) -> int:
    """Return the floating-point operations of the actions of a rank."""
    return sum(count * _flops(work) for work, count in _passes(records, order))


def rank_collectives(
    records: Mapping[int, StageRecord], order: Sequence[PipelineAction], others: Sequence[CollectiveRecord]
) -> Counter[CollectiveRecord]:
    """Return the number of each collective of a rank: those of its stages and their optimizer, and ``others``."""
    once = [part for each in records.values() for part in (each.begin, each.end, each.step or each.optimizer)]
    found = Counter([*others, *(each for part in once for each in part.work if isinstance(each, CollectiveRecord))])
    for work, count in _passes(records, order):
        for each, times in Counter(each for each in work if isinstance(each, CollectiveRecord)).items():
            found[each] += times * count
    return found


def first_pass_collectives(records: Mapping[int, StageRecord], order: Sequence[PipelineAction]) -> list[CollectiveRecord]:
    """Return the collectives of the forwards of a rank, when they run once more before the step."""
    work = (each for kind, stage, _ in order if kind == "F" for each in records[stage].forward.work)
    return [each for each in work if isinstance(each, CollectiveRecord)]


def model_flops(program: Program, records: Sequence[StageRecord], order: Mapping[int, Sequence[PipelineAction]]) -> int:
    """Return the operations of a step without recomputation, over all ranks."""
    passes = (each for row in order.values() for each in _passes(dict(enumerate(records)), row))
    once = sum(count * model_flops_of(work) for work, count in passes)
    return once * program.axis_size("dp") * program.axis_size("tp")


def model_flops_of(work: Iterable[Work]) -> int:
    """Return the operations of some work without recomputation."""
    return sum(each.model_flops for each in work if isinstance(each, OperatorRecord))


def main_dtype(passes: Iterable[PassRecord]) -> torch.dtype:
    """Return the type in which some passes compute most of their floating-point operations; ``float32`` without any."""
    found: Counter[torch.dtype] = Counter()
    for each in passes:
        for record in each.work:
            if isinstance(record, OperatorRecord):
                found[record.dtype] += record.flops
    (dtype, flops), *_ = [*found.most_common(1), (torch.float32, 0)]
    return dtype if flops else torch.float32


def _flops(work: Sequence[Work]) -> int:
    return sum(each.flops for each in work if isinstance(each, OperatorRecord))


def _passes(records: Mapping[int, StageRecord], order: Sequence[PipelineAction]) -> Iterator[tuple[Sequence[Work], int]]:
    """Yield the work of each pass of a rank, and how often it runs."""
    microbatches = 1 + max((each.microbatch for each in order), default=0)
    passes = [records[stage].pass_of(kind, microbatch, microbatches) for kind, stage, microbatch in order]
    known = {id(each): each for each in passes}
    for number, count in Counter(map(id, passes)).items():
        yield known[number].work, count
