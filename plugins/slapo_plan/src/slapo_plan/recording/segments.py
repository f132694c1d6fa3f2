"""Passes cut at the borders of repeated blocks, so that blocks that were left out can be put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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


@dataclass
class Segments:
    """Records of one pass by the block that ran; ``""`` is what runs between blocks.

    Args:
        parts: Block and record, in the order in which they ran.
    """

    parts: list[tuple[str, PassRecord]] = field(default_factory=list)

    def whole(self, repeated: Mapping[str, int] | None = None) -> PassRecord:
        """Return the record of the whole pass.

        Args:
            repeated: How many further times a block runs right behind itself.
        """
        repeated = repeated or {}
        return PassRecord.join(part for name, part in self.parts for _ in range(1 + repeated.get(name, 0)))


class SegmentMarks:
    """Cuts passes where a block begins and ends; used as a context of the run.

    In the backward a block begins when the gradient of its output is there, and ends when that of its input is.

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

    def measure(self, run: Callable[[], Any]) -> Segments:
        """Run a pass and return its segments."""
        self._segments = Segments()
        self._begin("")
        self._recorder.take_work()
        run()
        self._cut("")
        return self._segments

    def _begin(self, name: str) -> None:
        self._name, self._start = name, self._recorder.memory.live
        self._recorder.memory.begin_peak()

    def _cut(self, name: str) -> None:
        """End the present segment; the next one is of ``name``."""
        memory = self._recorder.memory
        part = PassRecord(memory.peak - self._start, memory.live - self._start, self._recorder.take_work())
        if part.peak or part.change or part.work or self._name:
            self._segments.parts.append((self._name, part))
        self._begin(name)

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._cut(path)
        first = next(_with_gradient([*args, *kwargs.values()]), None)
        if first is not None:
            first.register_hook(partial(self._end_backward, path))  # type: ignore[no-untyped-call]

    def _leave(self, path: str, _: nn.Module, args: Any, result: Any) -> None:
        self._cut("")
        first = next(_with_gradient(tree_leaves(result)), None)
        self.outputs[path] = 0 if first is None else first.nbytes
        if first is not None:
            first.register_hook(partial(self._begin_backward, path))  # type: ignore[no-untyped-call]

    def _begin_backward(self, path: str, _: torch.Tensor) -> None:
        self._cut(path)

    def _end_backward(self, path: str, _: torch.Tensor) -> None:
        if self._name == path:  # else the block before has begun: its output is this block's input
            self._cut("")


def _with_gradient(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (each for each in values if isinstance(each, torch.Tensor) and each.requires_grad)
