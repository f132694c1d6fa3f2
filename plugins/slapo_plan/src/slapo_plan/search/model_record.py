"""Record of a model by its parts: each of its blocks, and what a stage runs before and behind its own blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..measurement.segmented_stage import SegmentedStage
from ..recording.segments import PassRecord, Segments
from ..records import Work
from .row_extrapolation import number_at_rows, pass_at_rows

NOTHING = PassRecord()
PASSES = ("forward", "first_backward", "next_backward", "inputs_backward", "first_weights", "next_weights")
"""Names of the passes of a micro-batch."""


@dataclass(frozen=True, eq=False)
class Part:
    """One block, or what a stage runs before or behind its blocks, on one rank and for one micro-batch.

    Args:
        forward: Its forward.
        first_backward: A backward that allocates gradients.
        next_backward: A backward that adds to them.
        inputs_backward: The first part of a split backward.
        first_weights: The second part, which allocates gradients.
        next_weights: A second part that adds to them.
        optimizer: The first step of the optimizer on its parameters.
        parameters: Bytes of its parameters.
        gradients: Bytes of their gradients.
        elements: Number of elements of these.
        late: Bytes that its forward allocates and the end of the stage's forward frees.
    """

    forward: PassRecord = NOTHING
    first_backward: PassRecord = NOTHING
    next_backward: PassRecord = NOTHING
    inputs_backward: PassRecord = NOTHING
    first_weights: PassRecord = NOTHING
    next_weights: PassRecord = NOTHING
    optimizer: PassRecord = NOTHING
    parameters: int = 0
    gradients: int = 0
    elements: int = 0
    late: int = 0

    def at(self, rows: int, other: Part) -> Part:
        """Return the part for some rows, on the line through this one, of one row, and ``other``, of two."""
        passes: dict[str, Any] = {name: pass_at_rows(getattr(self, name), getattr(other, name), rows) for name in PASSES}
        return replace(self, **passes, late=number_at_rows(self.late, other.late, rows))


@dataclass(frozen=True, eq=False)
class StageEnds:
    """Parts and messages that stages of one kind have beside their blocks.

    Args:
        entry: What runs before the first block; it has all parameters of the stage that are in no block.
        exit: What runs behind the last one.
        received: Bytes of the tensors that the stage receives.
        sent: Bytes of its outputs.
        sent_back: Bytes of the gradients of received tensors.
    """

    entry: Part = Part()
    exit: Part = Part()
    received: int = 0
    sent: int = 0
    sent_back: int = 0

    def at(self, rows: int, other: StageEnds) -> StageEnds:
        """Return the ends for some rows, as ``Part.at`` does."""
        sizes = {
            name: number_at_rows(getattr(self, name), getattr(other, name), rows) for name in ("received", "sent", "sent_back")
        }
        return StageEnds(self.entry.at(rows, other.entry), self.exit.at(rows, other.exit), **sizes)


@dataclass(frozen=True, eq=False)
class ModelRecord:
    """Parts of a model for one micro-batch.

    Args:
        first: Ends of the first stage; of the whole model without a pipeline.
        middle: Ends of the stages between.
        last: Ends of the last stage; those of ``first`` without a pipeline.
        blocks: All blocks in the order in which they run, by checkpoint policy; ``"none"`` keeps everything, and is the first.
            Equal blocks are the same object.
        paths: Paths of the blocks in the model.
        tied: Bytes of the parameters that the first and the last stage both hold.
        batch: Bytes of the batch's tensors.
        output: Bytes of the first tensor that a block returns.
    """

    first: StageEnds
    middle: StageEnds
    last: StageEnds
    blocks: Mapping[str, tuple[Part, ...]]
    paths: tuple[str, ...]
    tied: int = 0
    batch: int = 0
    output: int = 0

    def at(self, rows: int, other: ModelRecord) -> ModelRecord:
        """Return the record for some rows; ``self`` is of one row, ``other`` of two."""
        known: dict[int, Part] = {}
        for policy, parts in self.blocks.items():
            for own, their in dict.fromkeys(zip(parts, other.blocks[policy], strict=True)):
                known[id(own)] = own.at(rows, their)
        blocks = {policy: tuple(known[id(each)] for each in parts) for policy, parts in self.blocks.items()}
        ends = {name: getattr(self, name).at(rows, getattr(other, name)) for name in ("first", "middle", "last")}
        batch, output = number_at_rows(self.batch, other.batch, rows), number_at_rows(self.output, other.output, rows)
        return replace(self, **ends, blocks=blocks, batch=batch, output=output)


def as_pipeline(whole: ModelRecord) -> ModelRecord:
    """Return the record of a model's stages as the record of the whole model suggests it, without what cutting changes."""
    output = whole.output
    first = StageEnds(whole.first.entry, sent=output)
    last = StageEnds(exit=whole.last.exit, received=output, sent_back=output)
    tied = whole.tied / max(1, whole.first.entry.parameters)
    entry, behind = whole.first.entry, last.exit
    copies = PassRecord(round(entry.optimizer.peak * tied), round(entry.optimizer.change * tied))
    end = replace(
        behind,
        parameters=behind.parameters + round(entry.parameters * tied),
        gradients=behind.gradients + round(entry.gradients * tied),
        elements=behind.elements + round(entry.elements * tied),
        optimizer=PassRecord.join([behind.optimizer, copies]),
    )
    middle = StageEnds(received=output, sent=output, sent_back=output)
    return replace(whole, first=first, middle=middle, last=replace(last, exit=end))


def with_policies_of(stages: ModelRecord, whole: ModelRecord) -> ModelRecord:
    """Return the record of stages that were measured without checkpoints, with the blocks of the whole model under policies.

    Stages whose blocks do not run as modules have those of the whole model.
    """
    if len(stages.paths) == len(whole.paths):
        return replace(stages, blocks={**whole.blocks, "none": stages.blocks["none"]})
    found = as_pipeline(whole)
    ends = {
        name: replace(getattr(found, name), received=end.received, sent=end.sent, sent_back=end.sent_back)
        for name, end in (("first", stages.first), ("middle", stages.middle), ("last", stages.last))
    }
    return replace(found, first=ends["first"], middle=ends["middle"], last=ends["last"], tied=stages.tied)


class StageSplitter:
    """Splits the record of a stage into parts.

    Args:
        stage: The record; each of its blocks is a repeated one.
        parameters: Bytes of the parameters of each block by path, in the order of the repeated ones.
        before: Bytes of the parameters and buffers before the blocks, in the order of the model.
        behind: Bytes of those behind the blocks.
        itemsize: Bytes of an element of the stage's gradients, in the mean.
        keeps_copies: True if the engine steps fp32 copies of half-precision parameters.
    """

    def __init__(
        self,
        stage: SegmentedStage,
        parameters: Mapping[str, int],
        before: int,
        behind: int,
        itemsize: float,
        keeps_copies: bool,
    ) -> None:
        self._order = [*dict.fromkeys(name for name, _ in stage.forward.parts if name)]
        self._stage, self._parameters, self._keeps_copies = stage, parameters, keeps_copies
        self._before, self._behind, self._itemsize = before, behind, itemsize
        self._passes = {name: self._pieces(name) for name in PASSES}
        self._steps = dict(zip(parameters, stage.repeated_optimizer, strict=True))
        self._gradients = dict(zip(parameters, stage.repeated_gradients, strict=True))
        self._late = {path: stage.forward.freed_late(path) for path in self._order}

    def blocks(self) -> dict[str, Part]:
        """Return each block that ran by path, in the order in which they ran."""
        return {
            path: Part(
                **self._of(path),
                optimizer=self._step(self._steps[path], self._parameters[path]),
                parameters=self._parameters[path],
                gradients=self._gradients[path],
                elements=round(self._gradients[path] / self._itemsize),
                late=self._late[path],
            )
            for path in self._order
        }

    def ends(self) -> StageEnds:
        """Return what the stage has beside its blocks."""
        stage, own = self._stage, [*self.blocks().values()]
        steps = [self._steps[path] for path in self._order]
        change = stage.optimizer.change - sum(each.change for each in steps)
        working = stage.optimizer.peak - stage.optimizer.change - sum(each.peak - each.change for each in steps)
        work = _without(stage.optimizer.work, steps)
        gradients = stage.gradients - sum(each.gradients for each in own)

        def end(place: str, parameters: int, is_entry: bool) -> Part:
            share = parameters / max(1, self._before + self._behind)
            grows = round(change * share)
            step = PassRecord(grows + working, grows, work) if is_entry else PassRecord(grows, grows)
            own = round(gradients * share)
            given: dict[str, Any] = {"parameters": parameters, "gradients": own, "elements": round(own / self._itemsize)}
            return Part(**self._of(place), optimizer=self._step(step, parameters), **given)

        entry, behind = end("", self._before, True), end("behind", self._behind, False)
        late = sum(self._late.values())  # the sizes of a stage subtract what all its blocks free late
        forward = replace(behind.forward, change=behind.forward.change + late)
        return StageEnds(entry, replace(behind, forward=forward), stage.received, stage.sent, stage.sent_back)

    def _step(self, step: PassRecord, parameters: int) -> PassRecord:
        """Return a step with the copies that it steps, whose state is in fp32."""
        if not self._keeps_copies:
            return step
        change = 2 * (step.change + parameters)
        return replace(step, change=change, peak=change + step.peak - step.change)

    def _of(self, place: str) -> dict[str, Any]:
        return {name: found.get(place, NOTHING) for name, found in self._passes.items()}

    def _pieces(self, name: str) -> dict[str, PassRecord]:
        """Return a pass by part; what runs between blocks belongs to the block before it."""
        segments: Segments | None = getattr(self._stage, name)
        if segments is None:
            return {}
        reverse = name != "forward"
        parts = [*reversed(segments.parts)] if reverse else segments.parts
        if self._order and not any(path for path, _ in parts):
            return _in_equal_parts(segments.whole(), self._order)
        found: dict[str, list[PassRecord]] = {}
        name = ""
        last = self._order[-1] if self._order else None
        for path, record in parts:
            name = path or ("behind" if name == last else name)
            found.setdefault(name, []).append(record)
        return {name: PassRecord.join(reversed(records) if reverse else records) for name, records in found.items()}


def _in_equal_parts(whole: PassRecord, names: list[str]) -> dict[str, PassRecord]:
    """Return a pass that is not cut, e.g. of weights alone, as if each block had an equal share."""
    share = round(whole.change / len(names))
    size = -(-len(whole.work) // len(names))
    found = {}
    for index, name in enumerate(reversed(names)):
        rises = whole.peak if index == 0 else 0
        found[name] = PassRecord(rises, share, whole.work[index * size : (index + 1) * size])
    return found


def _without(work: tuple[Work, ...], parts: Iterable[PassRecord]) -> tuple[Work, ...]:
    """Return the work that is in none of some parts."""
    left = [*work]
    for each in parts:
        for record in each.work:
            if record in left:
                left.remove(record)
    return tuple(left)
