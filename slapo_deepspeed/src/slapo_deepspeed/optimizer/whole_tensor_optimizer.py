"""Optimizers that step whole tensors under ZeRO, whose ranks hold ranges of flattened parameters."""

from __future__ import annotations

from collections.abc import Iterator
from operator import sub
from typing import Any

import torch
import torch.distributed as dist

from slapo_core import BuildError, Program, shard_spec
from slapo_training.distributed import all_reduce
from slapo_training.model import Chunk, boxes, piece_of
from slapo_training.optimizers import WholeTensorOptimizer
from slapo_training.optimizers.probe import OneStep, is_step_divisible
from slapo_training.optimizers.whole_tensors import LocalBox, WholeTensor

from ..process_state._deepspeed_private import FlatRange, flat_ranges, full_shape, inner_optimizer, num_optimizer_steps


def steps_in_turns(optimizer: Any) -> bool:
    """Return True if calls of ``step`` for some parameters at a time give the same result as one call for all.

    DeepSpeed has no optimizer yet: stage 3 of ZeRO steps it once while it initializes.
    """
    is_joint = isinstance(optimizer, WholeTensorOptimizer) and optimizer.steps_together
    return not is_joint and is_step_divisible(WholeTensorOptimizer.unwrap(optimizer))


def bind(model: Any, program: Program, in_turns: bool) -> None:
    """Bind a whole-tensor optimizer to the values that DeepSpeed's engine steps. Collective with ZeRO.

    ``in_turns`` is the result of ``steps_in_turns`` for the optimizer.

    Raises:
        BuildError: on every rank: a step depends on all parameters, but ZeRO steps groups of them one after the other.
    """
    optimizer = inner_optimizer(model)
    if isinstance(optimizer, WholeTensorOptimizer):
        optimizer.hide_state()
    _check_turns(model, optimizer, program, in_turns)
    if not isinstance(optimizer, WholeTensorOptimizer) or (ranges := _ranges(model, optimizer, program)) is None:
        return
    flats = list({id(each.flat): each.flat for each in ranges.values()}.values())
    places = {id(flat): place for place, flat in enumerate(flats)}
    for each in optimizer.stand_ins:
        own = [ranges[id(whole.source)] for whole in each.wholes]
        labels = [places[id(one.flat)] for one in own]
        holdings = [
            holding
            for number, (whole, one, place) in enumerate(zip(each.wholes, own, labels, strict=True))
            for holding in _holdings(number, whole, place, one)
        ]
        each.bind(lambda: flats, holdings, labels)
    optimizer.flats = flats


class MergedStep:
    """Wrapper of an optimizer's ``step`` by which all calls in one step of DeepSpeed count as one.

    With ZeRO, DeepSpeed calls ``step`` once for each flat tensor.
    """

    def __init__(self, model: Any) -> None:
        optimizer: Any = inner_optimizer(model)
        self._current: OneStep | None = None
        if optimizer is None or (num_optimizer_steps(model.optimizer) or 1) < 2:
            return
        self._inner, step = WholeTensorOptimizer.unwrap(optimizer), optimizer.step

        def merged_step(*given: Any, **named: Any) -> Any:
            if self._current is None:
                self._current = OneStep(self._inner)
            else:
                self._current.restore_counters()
            return step(*given, **named)

        optimizer.step = merged_step

    def begin(self) -> None:
        self._current = None


def _check_turns(model: Any, optimizer: Any, program: Program, in_turns: bool) -> None:
    """Refuse an optimizer that gives another result if ZeRO steps groups of parameters in turns. Collective with ZeRO."""
    number = num_optimizer_steps(model.optimizer)
    if number is None:
        return
    differs = optimizer is not None and number > 1 and not in_turns
    found = torch.tensor([int(differs)], device=model.device)
    if all_reduce(found, program.mesh, dist.ReduceOp.MAX).item():
        model.destroy()
        kind = "the optimizer" if optimizer is None else type(WholeTensorOptimizer.unwrap(optimizer)).__name__
        raise BuildError(
            f"{kind} makes the step of one parameter depend on the others, and ZeRO steps {number} groups of them one after "
            "the other; give one group, or use stage 0 of ZeRO"
        )


def _ranges(model: Any, optimizer: WholeTensorOptimizer, program: Program) -> dict[int, FlatRange] | None:
    """Return this rank's range of each parameter by its ``id``; None without ZeRO."""
    sources = {id(whole.source): whole.source for each in optimizer.stand_ins for whole in each.wholes}
    ranges = flat_ranges(model.optimizer, program.axis_rank("dp"), sources.values())
    return None if ranges is None else {key: ranges[key] for key in sources}


def _holdings(number: int, whole: WholeTensor, place: int, own: FlatRange) -> Iterator[LocalBox]:
    """Iterate over the boxes of a whole tensor in the flat tensor with this rank's range of its source."""
    shape = tuple(full_shape(whole.source))
    chunks = [*whole.chunks(piece_of(torch.empty(shape, device="meta"), shard_spec(whole.source)).chunks())]
    at = own.at
    for begin, sizes in boxes(shape, own.first, own.last):
        for chunk in chunks:
            # the box is one of the local tensor
            if (part := Chunk(chunk.offset, chunk.local, chunk.sizes).inside(begin, sizes)) is not None:
                local = tuple(map(sub, part.offset, begin))
                yield LocalBox(number, place, Chunk(local, part.local, part.sizes), (at, sizes))
        at += torch.Size(sizes).numel()
