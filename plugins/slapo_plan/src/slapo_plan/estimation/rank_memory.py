"""Memory of one rank over a step, put together from the records of its stages in the order of its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slapo_training import MemoryRules, PipelineAction

from ..measurement.stage_record import StageRecord
from ..recording.segments import PassRecord


class RankPlaces(NamedTuple):
    """Tensors that stages of one rank share.

    Args:
        repeated: Bytes of parameters of a stage that another stage of the rank holds, too; given for one of the two.
        passes_on: Stages whose outputs go to a stage of the same rank.
        other_buffers: Bytes of buffers of stages of other ranks, which this rank holds, too.
        tie_copies: Bytes of the copies in which gradients of tied parameters of several ranks are summed.
    """

    repeated: Mapping[int, int] = {}
    passes_on: frozenset[int] = frozenset()
    other_buffers: int = 0
    tie_copies: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank at the peak of a step, in bytes.

    Args:
        kinds: Bytes by kind: ``parameters``, ``buffers`` (with what modules keep from forwards), ``gradients``, ``buckets`` of
            gradients, ``optimizer``, ``batch`` (with the schedule's example inputs), ``gathered`` parameters, ``messages``
            (receive buffers and tensors on their way), ``activations`` (saved for backwards) and ``working`` (within one
            action).
        when: Action of the peak, e.g. ``"backward of micro-batch 3, stage 0"``.
        held: Bytes between steps.
    """

    kinds: Mapping[str, int]
    when: str
    held: int

    @property
    def peak(self) -> int:
        """Most bytes in the step."""
        return sum(self.kinds.values())


def rank_memory(
    records: Mapping[int, StageRecord],
    order: Sequence[PipelineAction],
    rules: MemoryRules,
    microbatches: int,
    batch: int,
    places: RankPlaces,
) -> RankMemory:
    """Return the memory of one rank at the peak of a step.

    Args:
        records: Record of each of its stages, by index.
        order: Its actions.
        rules: Memory of the engine beside the model.
        microbatches: Number of micro-batches.
        batch: Bytes of the rank's batch, and of the schedule's example inputs.
        places: Tensors that its stages share.
    """
    stages = records.values()
    gradients = sum(each.gradients + each.added * (microbatches - 1) for each in stages)
    once = 1 - sum(places.repeated.values()) / max(1, sum(each.parameters for each in stages))  # ties of its stages
    step = _Step(
        {
            "parameters": round(once * sum(each.parameters for each in stages)),
            "buffers": places.other_buffers + sum(each.buffers + each.kept for each in stages),
            "gradients": 0,
            "buckets": gradients if rules.buckets else 0,
            "optimizer": round(once * sum(each.optimizer.change for each in stages)),
            "batch": batch,
            "gathered": 0,
            "messages": sum(each.received + each.awaited for each in stages) * microbatches * rules.receive_buffers,
            "activations": 0,
        }
    )
    between = round(once * gradients)
    held = sum(step.now.values()) + (0 if rules.buckets else between)
    step.peak(0, "between steps")
    for each in stages:
        step.peak(each.begin.peak, "start of the step")
        step.now["gathered"] += each.begin.change
    step.run(records, order, rules, places, keeps_gradients=rules.buckets and microbatches == 1)
    step.now["activations"] = 0
    step.now["gradients"] += sum(each.added for each in stages) * microbatches
    for each in stages:
        step.peak(each.end.peak, "reduction of gradients")
        step.now["gradients"] += each.end.change + each.begin.change
        step.now["gathered"] -= each.begin.change
    if rules.flattens_gradients:
        step.peak(between, "reduction of gradients")
    step.peak(places.tie_copies, "sum of tied gradients")
    if rules.buckets:  # reduced gradients are views of the buckets
        step.now["gradients"] = 0
    working = max((each.optimizer.peak - each.optimizer.change for each in stages), default=0)
    step.peak(working, "optimizer step")
    return RankMemory(step.best[1], step.best[2], held)


_NAMES = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}


class _Step:
    """State of a rank's memory while its actions run."""

    def __init__(self, held: dict[str, int]) -> None:
        self.now = dict(held)
        self.best: tuple[int, dict[str, int], str] = (-1, {}, "")
        self._on_the_way = 0

    def peak(self, working: int, when: str) -> None:
        total = sum(self.now.values()) + working
        if total > self.best[0]:
            self.best = total, {**self.now, "working": working}, when

    def run(
        self,
        records: Mapping[int, StageRecord],
        order: Sequence[PipelineAction],
        rules: MemoryRules,
        places: RankPlaces,
        keeps_gradients: bool,
    ) -> None:
        """Run all actions; with ``keeps_gradients`` the first backward finds gradients."""
        begun: set[int] = set()
        forwards = 0
        for kind, index, microbatch in order:
            record = records[index]
            stage = f", stage {index}" if len(records) > 1 else ""
            kind = "B" if kind == "I" and record.inputs_backward is None else kind
            if kind == "W" and record.inputs_backward is None:
                continue
            is_first = kind in "BW" and index not in begun
            allocates = is_first and not keeps_gradients
            done = _pass(record, kind, allocates)
            repeated = places.repeated.get(index, 0) if allocates and begun else 0
            # a tied gradient is computed before it is added to the one that exists
            self.peak(done.peak, f"{_NAMES[kind]} of micro-batch {microbatch}{stage}")
            grown = record.gradient_growth if allocates else 0
            self.now["gradients"] += grown - repeated
            self.now["activations"] += done.change - grown
            begun |= {index} if is_first else set()
            forwards += kind == "F" and not begun
            if rules.receive_buffers:
                self.now["messages"] += self._messages(kind, index, record, rules, places, is_first and forwards > 1)
        self.now["messages"] -= self._on_the_way

    def _messages(
        self, kind: str, index: int, record: StageRecord, rules: MemoryRules, places: RankPlaces, ends_warmup: bool
    ) -> int:
        """Return the growth of messages by one action.

        A sent output is an activation until its backward. Stages of one rank pass a tensor on, which then takes the place of a
        receive buffer.
        """
        sent_back = record.sent_back if index - 1 not in places.passes_on else 0
        passed = record.sent if index in places.passes_on else 0
        sent = record.sent - passed
        if passed:  # its buffer is the output itself from the forward on
            kept = {"F": 0, "I": sent_back, "W": 0, "B": sent_back}[kind] if rules.keeps_sent else 0
            return kept + {"F": -passed, "I": 0, "W": passed, "B": passed}[kind]
        if rules.keeps_sent:
            return {"F": 0, "I": sent_back, "W": sent, "B": sent + sent_back}[kind]
        if kind != "B":
            return 0
        before, self._on_the_way = self._on_the_way, sent_back
        return sent_back - before + (sent if ends_warmup else 0)


def _pass(record: StageRecord, kind: str, is_first: bool) -> PassRecord:
    if kind == "F":
        return record.forward
    if kind == "I":
        assert record.inputs_backward is not None
        return record.inputs_backward
    if kind == "W":
        return record.first_weights if is_first else record.next_weights
    return record.first_backward if is_first else record.next_backward
