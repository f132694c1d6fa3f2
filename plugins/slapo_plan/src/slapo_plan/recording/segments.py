"""Passes cut at the borders of repeated blocks, so that blocks that were left out can be put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..records import Work
from .run_recorder import RunRecorder


@dataclass(frozen=True)
class PassRecord:
    """One forward or backward of one micro-batch, or one step of the optimizer.

    Args:
        peak: Most bytes during the pass beyond those at its start.
        change: Bytes at its end beyond those at its start; negative in a backward that frees activations.
        work: Operators and collectives, in order.
    """

    peak: int = 0
    change: int = 0
    work: tuple[Work, ...] = ()

    @staticmethod
    def join(passes: Iterable[PassRecord]) -> PassRecord:
        """Return the record of passes that run one after the other."""
        peak = change = 0
        work: list[Work] = []
        for each in passes:
            peak = max(peak, change + each.peak)
            change += each.change
            work += each.work
        return PassRecord(peak, change, tuple(work))


class RepeatedBlocks(NamedTuple):
    """Blocks that stand for others.

    Args:
        paths: Paths of the blocks, which run one after the other.
        first: Paths of the first blocks that are like them.
        times: How many further times all of them run behind themselves.
    """

    paths: tuple[str, ...]
    first: tuple[str, ...]
    times: int

    def freed_late(self, freed: Mapping[str, int]) -> int:
        """Return the bytes that the further blocks allocate, and that a part of the run outside of all blocks frees.

        Such are weights that autocast casts once and keeps until the forward ends.

        Args:
            freed: Bytes that the part frees, by the block that allocated them.
        """
        return self.times * min(sum(freed[path] for path in paths) for paths in (self.paths, self.first))


@dataclass
class Segments:
    """Records of one pass by the block that ran; ``""`` is what runs between blocks.

    Args:
        parts: Block and record, in the order in which they ran.
        freed: Bytes that each of them freed, by the block that allocated them.
    """

    parts: list[tuple[str, PassRecord]] = field(default_factory=list)
    freed: list[Counter[str]] = field(default_factory=list)

    def whole(self, repeated: Sequence[RepeatedBlocks] = ()) -> PassRecord:
        """Return the record of the whole pass.

        What runs between a block and the next one is repeated with it, e.g. the end of a variable that held its input.

        Args:
            repeated: Blocks that run further times than they were measured.
        """
        repetition = {path: each for each in repeated for path in each.paths}
        owners = self._owners(repetition)
        found: list[PassRecord] = []
        for owner, run in groupby(range(len(self.parts)), key=owners.__getitem__):
            places = [*run]
            if owner is None:
                found += [self._outside(place, repeated) for place in places]
            else:
                found += [self.parts[place][1] for place in places] * (1 + owner.times)
        return PassRecord.join(found)

    def followed_by(self, other: Segments) -> Segments:
        """Return the segments of this pass and of another one behind it."""
        return Segments([*self.parts, *other.parts], [*self.freed, *other.freed])

    def freed_late(self, path: str) -> int:
        """Return the bytes that a block allocated and that a part outside of all blocks freed."""
        return sum(freed[path] for (name, _), freed in zip(self.parts, self.freed, strict=True) if not name)

    def _owners(self, repetition: Mapping[str, RepeatedBlocks]) -> list[RepeatedBlocks | None]:
        """Return the repetition of each part; what runs between two blocks belongs to the first of them."""
        named = [place for place, (name, _) in enumerate(self.parts) if name]
        last = named[-1] if named else -1
        found: list[RepeatedBlocks | None] = []
        for place, (name, _) in enumerate(self.parts):
            is_between = not name and found and place < last
            found.append(found[-1] if is_between else repetition.get(name))
        return found

    def _outside(self, place: int, repeated: Sequence[RepeatedBlocks]) -> PassRecord:
        """Return the record of a part that is not repeated, with what it frees of blocks that were not measured."""
        name, part = self.parts[place]
        late = 0 if name else sum(each.freed_late(self.freed[place]) for each in repeated)
        return replace(part, change=part.change - late)


class SegmentMarks:
    """Cuts passes where a block begins and ends; used as a context of the run.

    In the backward a block begins when the gradient of its output is there, and ends when that of its input is. A block whose
    forward kept no graph begins when it is recomputed, and ends when the next block begins, since its values are freed late.

    Args:
        recorder: Records the run.
        blocks: Blocks by path.

    Attributes:
        outputs: Bytes of the first tensor that each block returned.
    """

    def __init__(self, recorder: RunRecorder, blocks: dict[str, nn.Module]) -> None:
        self._recorder, self._blocks = recorder, blocks
        self._handles = ExitStack()
        self._segments = Segments()
        self._name = ""
        self._start = 0
        self._is_backward = self._is_recomputed = False
        self.outputs: dict[str, int] = {}

    def __enter__(self) -> SegmentMarks:
        for path, block in self._blocks.items():
            before = block.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True, prepend=True)
            after = block.register_forward_hook(partial(self._leave, path))
            self._handles.callback(before.remove)
            self._handles.callback(after.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def measure(self, run: Callable[[], Any], is_backward: bool = False) -> Segments:
        """Run a pass and return its segments."""
        self._segments, self._is_backward = Segments(), is_backward
        self._begin("")
        self._recorder.take_work()
        run()
        self._cut("")
        return self._segments

    def _begin(self, name: str) -> None:
        self._name, self._start, self._is_recomputed = name, self._recorder.memory.live, False
        self._recorder.memory.begin_segment(name)

    def _cut(self, name: str) -> None:
        """End the present segment; the next one is of ``name``."""
        memory = self._recorder.memory
        part = PassRecord(memory.peak - self._start, memory.live - self._start, self._recorder.take_work())
        if part.peak or part.change or part.work or self._name:
            self._segments.parts.append((self._name, part))
            self._segments.freed.append(memory.freed)
        self._begin(name)

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._name != path:
            self._cut(path)
            self._is_recomputed = self._is_backward
        first = next(_with_gradient([*args, *kwargs.values()]), None)
        if first is not None:
            first.register_hook(partial(self._end_backward, path))  # type: ignore[no-untyped-call]

    def _leave(self, path: str, _: nn.Module, args: Any, result: Any) -> None:
        if not self._is_backward:  # else the block's backward follows its recomputation
            self._cut("")
        first = next(_with_gradient(tree_leaves(result)), None)
        self.outputs[path] = 0 if first is None else first.nbytes
        if first is not None:
            first.register_hook(partial(self._begin_block, path))  # type: ignore[no-untyped-call]

    def _begin_block(self, path: str, *_: object) -> None:
        if self._name != path:
            self._cut(path)

    def _end_backward(self, path: str, _: torch.Tensor) -> None:
        if self._name == path and not self._is_recomputed:  # else the block before has begun: its output is this block's input
            self._cut("")


def _with_gradient(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (each for each in values if isinstance(each, torch.Tensor) and each.requires_grad)
