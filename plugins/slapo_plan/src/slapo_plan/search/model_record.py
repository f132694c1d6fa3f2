"""Record of a whole model by its parts: what lies before its blocks, each block, and what lies behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule
from slapo_tracing.recording import Sandbox

from ..measurement.repeated_blocks import BlockRun, block_runs, trimmed_runs
from ..measurement.stage_run import step_record
from ..recording.run_recorder import RunRecorder
from ..recording.segments import PassRecord, SegmentMarks, Segments
from ..recording.storage_tracker import storage_bytes
from ..records import CollectiveRecord, OperatorRecord, Work

Forward = Callable[[Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """One block, or what lies before or behind all blocks, on one rank and for one micro-batch.

    Args:
        forward: Its forward.
        backward: A backward that adds to gradients.
        optimizer: The first step of the optimizer on its parameters.
        parameters: Bytes of its parameters.
        gradients: Bytes of their gradients.
        numbers: Elements of its parameters.
        output: Bytes of the tensor that it gives to the next part.
    """

    forward: PassRecord
    backward: PassRecord
    optimizer: PassRecord
    parameters: int
    gradients: int
    numbers: int
    output: int

    def at(self, rows: int, other: Part, other_rows: int) -> Part:
        """Return the part for another number of rows, on the line through this one's first row and ``other``."""
        times = (rows - 1) / (other_rows - 1)
        forward, backward = (_line(getattr(self, name), getattr(other, name), times) for name in ("forward", "backward"))
        return replace(self, forward=forward, backward=backward, output=_number(self.output, other.output, times))


@dataclass(frozen=True, eq=False)
class ModelRecord:
    """Parts of a model in the order in which they run.

    Args:
        before: What lies before the first block.
        blocks: All blocks; equal ones are the same object.
        behind: What lies behind the last block, with the loss.
        paths: Paths of the blocks in the model.
    """

    before: Part
    blocks: tuple[Part, ...]
    behind: Part
    paths: tuple[str, ...]

    def at(self, rows: int, other: ModelRecord, other_rows: int) -> ModelRecord:
        """Return the record for another number of rows; ``self`` is of one row."""
        known = {id(own): own.at(rows, their, other_rows) for own, their in zip(self.blocks, other.blocks, strict=True)}
        before, behind = (
            own.at(rows, their, other_rows) for own, their in ((self.before, other.before), (self.behind, other.behind))
        )
        return ModelRecord(before, tuple(known[id(each)] for each in self.blocks), behind, self.paths)


def _line(one: PassRecord, other: PassRecord, times: float) -> PassRecord:
    work: tuple[Work, ...] = one.work
    if len(one.work) == len(other.work):
        work = tuple(_work_at(*pair, times) for pair in zip(one.work, other.work, strict=True))
    return PassRecord(_number(one.peak, other.peak, times), _number(one.change, other.change, times), work)


def _work_at(one: Work, other: Work, times: float) -> Work:
    nbytes = _number(one.nbytes, other.nbytes, times)
    if isinstance(one, CollectiveRecord) or isinstance(other, CollectiveRecord):
        return one._replace(nbytes=nbytes)
    shape = tuple(_number(*pair, times) for pair in zip(one.shape, other.shape, strict=False))
    return one._replace(nbytes=nbytes, flops=_number(one.flops, other.flops, times), shape=shape)


def _number(one: int, other: int, times: float) -> int:
    return round(one + (other - one) * times)


@contextmanager
def trimmed_copy(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[BlockRun, list[str]]]]]:
    """Yield a copy of a model, on meta, with three blocks of each run of equal ones, and these runs with their paths."""
    paths = {id(module): path for path, module in model.named_modules()}
    runs = block_runs(model)
    with trimmed_runs(runs):
        made = copy.deepcopy(model)
    yield made, [(run, [f"{paths[id(run.holder)]}.{name}" for name in run.names]) for run in runs]


def record_model(
    schedule: Schedule,
    parts: Sequence[Mapping[str, Any]],
    forward: Forward,
    optimizer: Any,
    lists: list[tuple[BlockRun, list[str]]],
) -> list[ModelRecord]:
    """Run micro-batches through a trimmed model on fake tensors, and cut what they record at the borders of its blocks.

    Args:
        schedule: Schedule of the copy of ``trimmed_copy``.
        parts: Arguments of each micro-batch that is recorded.
        forward: Calls the model as its engine does, and returns the loss.
        optimizer: Factory of the optimizer.
        lists: Runs of the unmodified model, as ``trimmed_copy`` gave them.
    """
    root = schedule.root_module
    sandbox = Sandbox(root, parts[0], fake=True, keeps_values=True)
    with sandbox.open(grad=True):
        recording = _PartRecorder(root, forward, optimizer, lists)
        recording.run(parts[0])  # its backward allocates the gradients
        return [recording.record(part) for part in parts]


class _PartRecorder:
    def __init__(self, root: nn.Module, forward: Forward, optimizer: Any, lists: list[tuple[BlockRun, list[str]]]) -> None:
        self.root, self.forward, self.optimizer, self.lists = root, forward, optimizer, lists
        self.recorder = RunRecorder()
        self.recorder.memory.add([[*root.parameters()], [*root.buffers()]])
        modules = dict(root.named_modules())
        self.kept: dict[str, nn.Module] = {}
        self.copies: dict[str, list[str]] = {}  # measured block: paths in the unmodified model that it stands for
        for holder, group in _by_holder(lists):
            names = iter(range(len(modules[holder]._modules)))
            for run, paths in group:
                kept = [f"{holder}.{next(names)}" for _ in run.kept]
                self.kept |= {path: modules[path] for path in kept}
                stands = [[path] for path in paths] if len(kept) == len(paths) else [[paths[0]], paths[1:-1], [paths[-1]]]
                self.copies |= dict(zip(kept, stands, strict=True))
        self.outputs: dict[str, int] = {}
        self.users: dict[int, set[str]] = {}
        self.order: list[str] = []

    def record(self, part: Mapping[str, Any]) -> ModelRecord:
        self.recorder.memory.add([*part.values()])
        forward, backward = self.run(part)
        forwards, backwards = self._by_part(forward, False), self._by_part(backward, True)
        own = self._parameters()
        made = {name: self._part(name, forwards, backwards, own) for name in ("", *self.order, "behind")}
        blocks = [(path, made[name]) for name in self.order for path in self.copies[name]]
        paths, parts = zip(*blocks, strict=True) if blocks else ((), ())
        return ModelRecord(made[""], parts, made["behind"], paths)

    def run(self, part: Mapping[str, Any]) -> tuple[Segments, Segments]:
        """Run one micro-batch; return the segments of its forward and its backward."""
        held: list[torch.Tensor] = []
        with ExitStack() as hooks, self.recorder, SegmentMarks(self.recorder, self.kept) as marks:
            self.order, self.begun = [], set[str]()
            for path, module in self.root.named_modules():
                handle = module.register_forward_pre_hook(lambda each, _, path=path: self._enter(path, each))
                hooks.callback(handle.remove)
                if path in self.kept:
                    after = module.register_forward_hook(lambda each, _, result, path=path: self._leave(path, result))
                    hooks.callback(after.remove)
            forward = marks.measure(lambda: held.append(self.forward(part)))
            backward = marks.measure(lambda: held.pop().backward())  # type: ignore[no-untyped-call]
        return forward, backward

    def _enter(self, path: str, module: nn.Module) -> None:
        if path in self.kept and path not in self.begun:
            self.begun.add(path)
            self.order.append(path)
        place = "behind" if len(self.begun) == len(self.kept) else ""
        for parameter in module._parameters.values():
            if parameter is not None:
                self.users.setdefault(id(parameter), set()).add(place)

    def _leave(self, path: str, result: Any) -> None:
        first = result[0] if isinstance(result, tuple) else result
        self.outputs[path] = first.nbytes if isinstance(first, torch.Tensor) else 0

    def _by_part(self, segments: Segments, reverse: bool) -> dict[str, PassRecord]:
        """Join what runs between blocks to the block before it."""
        parts = [*reversed(segments.parts)] if reverse else segments.parts
        found: dict[str, list[PassRecord]] = {}
        name = ""
        for path, record in parts:
            name = path or ("behind" if self.order and name == self.order[-1] else name)
            found.setdefault(name, []).append(record)
        return {name: PassRecord.join(reversed(records) if reverse else records) for name, records in found.items()}

    def _parameters(self) -> dict[str, list[nn.Parameter]]:
        of_block = {name: [*dict.fromkeys(self.kept[name].parameters())] for name in self.order}
        inside = {id(each) for each in chain.from_iterable(of_block.values())}
        found: dict[str, list[nn.Parameter]] = {**of_block, "": [], "behind": []}
        for each in self.root.parameters():
            for place in self.users.get(id(each), {""}) if id(each) not in inside else ():
                found[place].append(each)
        return found

    def _part(
        self, name: str, forwards: dict[str, PassRecord], backwards: dict[str, PassRecord], own: dict[str, list[nn.Parameter]]
    ) -> Part:
        trained = [each for each in own[name] if each.grad is not None]
        step = PassRecord()
        if trained and self.optimizer is not None:
            step = step_record(self.recorder, self.optimizer, trained)
        return Part(
            forwards.get(name, PassRecord()),
            backwards.get(name, PassRecord()),
            step,
            storage_bytes(own[name]),
            storage_bytes(each.grad for each in trained if each.grad is not None),
            sum(each.numel() for each in own[name]),
            self.outputs.get(name, 0) or (next(iter(self.outputs.values()), 0) if not name else 0),
        )


def _by_holder(lists: list[tuple[BlockRun, list[str]]]) -> Iterator[tuple[str, list[tuple[BlockRun, list[str]]]]]:
    """Group runs by the path of their list."""
    grouped: dict[str, list[tuple[BlockRun, list[str]]]] = {}
    for run, paths in lists:
        grouped.setdefault(paths[0].rpartition(".")[0], []).append((run, paths))
    yield from grouped.items()


def flops_of(record: PassRecord) -> int:
    """Return the floating-point operations of a pass."""
    return sum(each.flops for each in record.work if isinstance(each, OperatorRecord))
