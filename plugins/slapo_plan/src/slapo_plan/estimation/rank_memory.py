"""Memory of one rank over a step, put together from the records of its stages in the order of its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slapo_training import MemoryRules, PipelineAction

from ..measurement.stage_run import PassRecord, StageRecord


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank at the peak of a step, in bytes.

    Args:
        kinds: Bytes by kind: ``parameters``, ``buffers``, ``gradients``, ``buckets`` of gradients,
            ``optimizer``, ``batch``, ``gathered`` parameters, ``messages`` (receive buffers and tensors on their way), ``activations`` (saved for backwards) and ``working`` (within one action).
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
    records: Mapping[int, StageRecord], order: Sequence[PipelineAction], rules: MemoryRules, microbatches: int, batch: int
) -> RankMemory:
    """Return the memory of one rank at the peak of a step.

    Args:
        records: Record of each of its stages, by index.
        order: Its actions.
        rules: Memory of the engine beside the model.
        microbatches: Number of micro-batches.
        batch: Bytes of the rank's batch.
    """
    stages = records.values()
    gradients = sum(each.gradients for each in stages)
    step = _Step(
        {
            "parameters": sum(each.parameters for each in stages),
            "buffers": sum(each.buffers for each in stages),
            "gradients": 0,
            "buckets": gradients if rules.buckets else 0,
            "optimizer": sum(each.optimizer.change for each in stages),
            "batch": batch,
            "gathered": 0,
            "messages": sum(each.received + each.sent for each in stages) * microbatches * rules.receive_buffers,
            "activations": 0,
        }
    )
    held = sum(step.now.values()) + (0 if rules.buckets else gradients)
    step.peak(0, "between steps")
    for each in stages:
        step.peak(each.begin.peak, "start of the step")
        step.now["gathered"] += each.begin.change
    step.run(records, order, rules, keeps_gradients=rules.buckets and microbatches == 1)
    step.now["activations"] = 0
    for each in stages:
        step.peak(each.end.peak, "reduction of gradients")
        step.now["gradients"] += each.end.change + each.begin.change
        step.now["gathered"] -= each.begin.change
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
        keeps_gradients: bool,
    ) -> None:
        """Run all actions; with ``keeps_gradients`` the first backward finds gradients."""
        begun: set[int] = set()
        for kind, index, microbatch in order:
            record = records[index]
            whole = kind if kind != "I" or record.inputs_backward is not None else "B"
            stage = f", stage {index}" if len(records) > 1 else ""
            is_first = not keeps_gradients and index not in begun
            if whole in "BW":
                begun.add(index)
            done = _pass(record, whole, is_first)
            self.peak(done.peak, f"{_NAMES[kind]} of micro-batch {microbatch}{stage}")
            grown = _growth(record) if whole in "BW" and is_first else 0
            self.now["gradients"] += grown
            self.now["activations"] += done.change - grown
            if kind != "W":
                self._send(record.sent if kind == "F" else record.sent_back, rules)

    def _send(self, message: int, rules: MemoryRules) -> None:
        if not rules.receive_buffers or not message:
            return
        self.now["messages"] += message - (0 if rules.keeps_sent else self._on_the_way)
        self._on_the_way = message


def _pass(record: StageRecord, kind: str, is_first: bool) -> PassRecord:
    if kind == "F":
        return record.forward
    if kind == "I":
        assert record.inputs_backward is not None
        return record.inputs_backward
    if kind == "W":
        return record.first_weights if is_first else record.next_weights
    return record.first_backward if is_first else record.next_backward


def _growth(record: StageRecord) -> int:
    """Return the bytes of gradients that the first backward of a step leaves."""
    return record.first_backward.change - record.next_backward.change
