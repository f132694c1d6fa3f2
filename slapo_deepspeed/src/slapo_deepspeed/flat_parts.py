"""Whole tensors that an optimizer steps, where ZeRO gives its ranks ranges of flattened parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core.parameters import shard_spec
from slapo_core.program import Program
from slapo_training.pieces import Chunk, piece_of
from slapo_training.whole_steps.exchange import Holding
from slapo_training.whole_steps.making import Layout
from slapo_training.whole_steps.optimizer import WholeTensorOptimizer
from slapo_training.whole_steps.wholes import Whole, boxes

from .shares import flattened, stepping

_STAGE_3 = (
    "stage 3 of ZeRO gives each rank ranges of flattened ones; use stage 0 to 2, or target='torch' with data_parallel='fsdp'"
)


def layout(program: Program, module: nn.Module, zero_stage: int) -> Layout:
    """What this rank's optimizer steps of the parameters: with ZeRO flat ranges of them, in fp32."""
    dtype = torch.float32 if zero_stage else None
    return Layout.of_engine(program, module, dtype, is_flat=zero_stage > 0, refusal=_STAGE_3 if zero_stage == 3 else "")


def bind(model: Any, program: Program) -> None:
    """Tell an optimizer of whole tensors where DeepSpeed keeps the values that it steps. Collective where ZeRO does.

    Args:
        model: DeepSpeed's engine.
        program: Whose parameters it has.
    """
    optimizer = stepping(model)
    lies = dict(flattened(model.optimizer, program.axis_rank("dp")))
    if not isinstance(optimizer, WholeTensorOptimizer) or not lies:
        return
    flats = list({id(flat): flat for flat, _, _ in lies.values()}.values())
    places = {id(flat): place for place, flat in enumerate(flats)}
    for each in optimizer.stand_ins:
        holdings = [
            holding
            for number, whole in enumerate(each.wholes)
            for holding in _holdings(number, whole, places, lies[id(whole.source)])
        ]
        labels = [optimizer.number_of(parameter) for parameter in each.parameters]
        each.bind(lambda: flats, holdings, labels)


def _holdings(number: int, whole: Whole, places: dict[int, int], lies: tuple[torch.Tensor, int, int]) -> Iterator[Holding]:
    """The boxes of a whole tensor in the flat one that has this rank's range of its source.

    Args:
        number: Of the whole tensor.
        whole: It.
        places: Of the flat tensors by their ids.
        lies: The flat tensor, how many numbers are before it, and how many before the source.
    """
    flat, low, offset = lies
    source = whole.source
    first, last = max(offset, low), min(offset + source.numel(), low + flat.numel())
    at = first - low
    chunks = [*whole.chunks(piece_of(source, shard_spec(source)).chunks())]
    for begin, sizes in boxes(tuple(source.shape), first - offset, last - offset):
        for chunk in chunks:
            if (part := _inside(chunk, begin, sizes)) is not None:
                yield Holding(number, places[id(flat)], part, (at, sizes))
        at += torch.Size(sizes).numel()


def _inside(chunk: Chunk, begin: Sequence[int], sizes: Sequence[int]) -> Chunk | None:
    """What of a box of a parameter is in another one, by its place in that; None where nothing is."""
    local, offset, found = [], [], []
    for start, where, size, low, length in zip(chunk.local, chunk.offset, chunk.sizes, begin, sizes, strict=True):
        first, last = max(start, low), min(start + size, low + length)
        if first >= last:
            return None
        local.append(first - low)
        offset.append(where + first - start)
        found.append(last - first)
    return Chunk(tuple(local), tuple(offset), tuple(found))
