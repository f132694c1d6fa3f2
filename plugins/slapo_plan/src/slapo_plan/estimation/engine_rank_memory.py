"""Memory of one rank of an engine that keeps tensors of its own beside the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slapo_training import MemoryRules, MessageSizes, PipelineAction

from ..measurement.stage_record import StageRecord
from ..recording.segments import PassRecord
from .rank_memory import RankMemory


def engine_rank_memory(
    records: Mapping[int, StageRecord], order: Sequence[PipelineAction], rules: MemoryRules, microbatches: int, batch: int
) -> RankMemory:
    """Return the memory of one rank at the peak of a step; arguments as of ``rank_memory``.

    The records have ``step``.
    """
    stages = records.values()
    kept = sum(each.received + each.sent_back for each in stages if not each.sent)
    kept_losses = min(rules.kept_losses, microbatches)
    fixed = sum(each.received + each.sent for each in stages) * rules.fixed_buffers
    kinds = {
        "parameters": sum(each.parameters for each in stages),
        "buffers": sum(each.buffers for each in stages),
        **{kind: sum(each.held.get(kind, 0) for each in stages) for kind in ("gradients", "buckets", "optimizer")},
        "batch": batch,
        "messages": fixed + kept * kept_losses,
        "activations": 0,
    }
    step = _EngineStep(kinds, rules, microbatches)
    step.peak(0, "between steps")
    held = sum(kinds.values())
    step.now["gradients"] -= sum(each.freed for each in stages)
    step.now["messages"] -= kept * (kept_losses > 0)  # the loss of a micro-batch takes the place of an earlier one
    sizes = {index: MessageSizes(each.received, each.sent, each.sent_back) for index, each in records.items()}
    messages = rules.messages(order, sizes) if rules.messages is not None else [0] * len(order)
    for action, nbytes in zip(order, messages, strict=True):
        stage = f", stage {action.stage}" if len(records) > 1 else ""
        if rules.messages is not None:
            step.now["messages"] = kinds["messages"] + nbytes
        step.run(action, records[action.stage], f"micro-batch {action.microbatch}{stage}")
    if rules.messages is not None:
        step.now["messages"] = kinds["messages"]
    step.peak(PassRecord.join(each.step for each in stages if each.step is not None).peak, "optimizer step")
    return RankMemory(step.best[1], step.best[2], held)


class _EngineStep:
    """State of a rank's memory while its actions run."""

    def __init__(self, held: dict[str, int], rules: MemoryRules, microbatches: int) -> None:
        self.now, self._rules, self._microbatches = dict(held), rules, microbatches
        self.best: tuple[int, dict[str, int], str] = (-1, {}, "")
        self._sent_back = 0

    def peak(self, working: int, when: str) -> None:
        total = sum(self.now.values()) + working
        if total > self.best[0]:
            self.best = total, {**self.now, "working": working}, when

    def run(self, action: PipelineAction, record: StageRecord, name: str) -> None:
        received = record.received * self._rules.holds_received
        forward, backward = (record.pass_of(kind, action.microbatch, self._microbatches) for kind in "FB")
        if action.kind == "F":
            self.now["messages"] += received
            self.peak(forward.peak, f"forward of {name}")
            self.now["activations"] += forward.change
            return
        has_messages = self._rules.holds_received and not self._rules.fixed_buffers
        self.peak(backward.peak + record.sent * has_messages, f"backward of {name}")
        self.now["gradients"] += backward.change + forward.change
        self.now["activations"] -= forward.change
        self.now["messages"] -= received
        if has_messages:  # the gradient that was sent last
            self.now["messages"] += record.sent_back - self._sent_back
            self._sent_back = record.sent_back
