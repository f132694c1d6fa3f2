"""Peak memory of a rank, from the parts of a model that its stages run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slapo_training import MemoryRules

from ..recording.segments import PassRecord
from .model_record import PASSES, Part, StageEnds
from .occupancy import State

Run = tuple[Part, int]
"""A part, and the number of times that it runs in a row."""


class Replicas(NamedTuple):
    """Memory that the replicas of a layout divide among them.

    Args:
        number: Number of replicas.
        divided: Kinds of memory that they divide among them.
        gathers_blocks: True if the parameters of a block are gathered as it runs; False if all are for the whole step.
    """

    number: int = 1
    divided: frozenset[str] = frozenset()
    gathers_blocks: bool = False

    def share(self, nbytes: int, kind: str) -> int:
        """Return the bytes of a kind on one replica."""
        return -(-nbytes // self.number) if kind in self.divided else nbytes

    def gather_blocks(self, blocks: Sequence[Run]) -> Iterator[Run]:
        """Yield the blocks of a stage, each with the passes that it has if its parameters are gathered as it runs."""
        sizes = [part.parameters for part, _ in blocks]
        for (part, times), size, before, behind in zip(blocks, sizes, [0, *sizes], [*sizes[1:], 0], strict=False):
            if times == 1:
                yield self._gather_block(part, before, behind), 1
                continue
            yield self._gather_block(part, before, size), 1
            yield self._gather_block(part, size, size), times - 2
            yield self._gather_block(part, size, behind), 1

    def _gather_block(self, part: Part, before: int, behind: int) -> Part:
        """Return the passes of a block that is gathered as it runs, while the next one to run is gathered as well.

        Whole gradients exist until they are reduced, behind the backward of each micro-batch.

        Args:
            part: The block.
            before: Bytes of the parameters of the block before it.
            behind: Bytes of the parameters of the block behind it.
        """
        size, whole, kept = part.parameters, part.gradients, self.share(part.gradients, "gradients")
        forward = replace(part.forward, peak=max(2 * size, part.forward.peak + size + behind))
        backward = part.first_backward
        peak = max(2 * size, backward.peak + size + before, backward.change + before + whole + kept)
        left = backward.change - whole
        first, following = replace(backward, peak=peak, change=left + kept), replace(backward, peak=peak, change=left)
        return replace(part, forward=forward, first_backward=first, next_backward=following)


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one stage.

    Args:
        passes: Peak and change of its passes, by their names in ``Part``.
        parameters: Bytes of parameters between steps.
        gradients: Bytes of gradients between steps.
        state: Bytes of the optimizer's state.
        elements: Number of elements with gradients, over all replicas.
        working: Bytes that the optimizer's step needs for a moment.
        gathered: Bytes of the parameters that are gathered for the whole step.
        unit: Bytes of the largest of the units that are gathered together.
        messages: Bytes that a micro-batch receives, sends, and sends back.
    """

    passes: Mapping[str, tuple[int, int]]
    parameters: int
    gradients: int
    state: int
    elements: int
    working: int
    gathered: int
    unit: int
    messages: tuple[int, int, int]

    @staticmethod
    def of(ends: StageEnds, blocks: Sequence[Run], replicas: Replicas) -> StageSizes:
        """Return the sizes of a stage with some blocks."""
        parts = [(ends.entry, 1), *blocks, (ends.exit, 1)]
        divides = "parameters" in replicas.divided
        gathers_blocks = divides and replicas.gathers_blocks
        runs = [parts[0], *replicas.gather_blocks(blocks), parts[-1]] if gathers_blocks else parts
        passes = {name: _join(name, runs if name == "forward" else [*reversed(runs)]) for name in PASSES}
        peak, change = passes["forward"]
        passes["forward"] = peak, change - sum(part.late * times for part, times in parts)
        parameters = sum(part.parameters * times for part, times in parts)
        around = ends.entry.parameters + ends.exit.parameters  # one unit, for the whole step
        gathered = (around if replicas.gathers_blocks else parameters) if divides else 0
        working = sum(times * (part.optimizer.peak - part.optimizer.change) for part, times in parts)
        return StageSizes(
            passes,
            replicas.share(parameters, "parameters"),
            replicas.share(sum(part.gradients * times for part, times in parts), "gradients"),
            replicas.share(sum(part.optimizer.change * times for part, times in parts), "optimizer"),
            sum(part.elements * times for part, times in parts),
            replicas.share(working, "optimizer"),
            gathered,
            max(around, *(part.parameters for part, _ in blocks), 0) if gathered else 0,
            (ends.received, ends.sent, ends.sent_back),
        )


def _join(name: str, runs: Iterable[Run]) -> tuple[int, int]:
    """Return peak and change of parts that run one after the other."""
    peak = change = 0
    for part, times in runs:
        if times:
            each: PassRecord = getattr(part, name)
            last = change + (times - 1) * each.change
            peak = max(peak, change + each.peak, last + each.peak)
            change = last + each.change
    return peak, change


def peak_bytes(
    stages: Sequence[StageSizes],
    states: Sequence[State],
    rules: MemoryRules,
    replicas: Replicas,
    microbatches: int,
    batch: int,
    tied: int = 0,
    shared: int = 0,
) -> int:
    """Return the most bytes of a rank in a step.

    Args:
        stages: Its stages, in order.
        states: Its largest states, with stages numbered as in ``stages``.
        rules: Memory of the engine beside the model.
        replicas: Memory that replicas divide among them.
        microbatches: Number of micro-batches.
        batch: Bytes of a micro-batch.
        tied: Bytes of parameters that two of its stages hold.
        shared: Bytes of parameters that it and one other rank hold.
    """
    parameters, gradients, state, elements = (
        sum(getattr(each, name) for each in stages) for name in ("parameters", "gradients", "state", "elements")
    )
    stepped = replicas.share(elements, "optimizer")
    state += rules.main_itemsize * stepped
    if rules.gradient_itemsize:
        state, gradients = state + rules.gradient_itemsize * elements, 0
    once: float = 1 - tied / max(1, sum(max(each.parameters, each.gathered) for each in stages))
    held = round(once * (parameters + state)) + (gradients if rules.buckets else 0)
    held += (microbatches + 1) * batch  # with the schedule's example inputs
    held += sum(_messages(each, rules, microbatches) for each in stages)
    kept = round(once * gradients)
    held_behind = held if rules.buckets else held + kept
    gathered = sum(each.gathered for each in stages)
    views = bool(rules.gradient_itemsize) or (rules.buckets and microbatches == 1)  # gradients are views of the buckets
    peak: int = max(
        held + gathered + max(each.unit for each in stages),
        held_behind + max(*(each.working for each in stages), rules.step_itemsize * stepped),
        held + 2 * kept if rules.flattens_gradients else 0,
        held_behind + 3 * replicas.share(shared, "gradients") if rules.tie_bucket else 0,  # those of both ranks, and their sum
    )
    units = sum(replicas.share(each.unit, "gradients") for each in stages if each.gathered)
    growth = [0 if views else each.passes["first_backward"][1] - each.passes["next_backward"][1] for each in stages]
    for each in states:
        now = sum(count * stages[index].passes["forward"][1] for index, count in enumerate(each.kept) if count)
        for index, count in enumerate(each.half):
            passes = stages[index].passes
            now += count * (passes["forward"][1] + passes["inputs_backward"][1])
        now += sum(growth[index] for index, begun in enumerate(each.begun) if begun)
        now += 0 if each.kind == "F" else rules.backward_bytes
        peak = max(peak, held + gathered + now + stages[each.stage].passes[_name(each, views)][0])
    whole = sum(growth) if gathered else 0
    return int(max(peak, held + gathered + whole + units))


def _name(state: State, views: bool) -> str:
    allocates = state.is_first and not views
    if state.kind == "F":
        return "forward"
    if state.kind == "I":
        return "inputs_backward"
    kind = "weights" if state.kind == "W" else "backward"
    return f"{'first' if allocates else 'next'}_{kind}"


def _messages(stage: StageSizes, rules: MemoryRules, microbatches: int) -> int:
    received, sent, sent_back = stage.messages
    if rules.receive_buffers:
        on_the_way = (sent + sent_back) * microbatches if rules.keeps_sent else sent_back + sent * (microbatches > 1)
        return (received + sent) * microbatches + on_the_way
    return received + sent if rules.fixed_buffers or rules.holds_received else 0
