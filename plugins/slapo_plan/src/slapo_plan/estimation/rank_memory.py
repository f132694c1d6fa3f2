"""Memory of one rank over a step, put together from the records of its stages in the order of its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slapo_training import MemoryRules, PipelineAction

from ..measurement.stage_run import StageRecord


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank at the peak of a step, in bytes.

    Args:
        kinds: Bytes by kind: ``parameters``, ``buffers``, ``gradients``, ``buckets`` of gradients,
            ``optimizer``, ``batch``, ``messages`` (receive
            buffers and tensors on their way), ``activations`` (saved for backwards) and ``working`` (within one action).
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


class _Step:
    """State of a rank's memory while its actions run."""

    def __init__(self, held: dict[str, int]) -> None:
        self.now = dict(held)
        self.best: tuple[int, dict[str, int], str] = (-1, {}, "")

    def peak(self, working: int, when: str) -> None:
        total = sum(self.now.values()) + working
        if total > self.best[0]:
            self.best = total, {**self.now, "working": working}, when


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
    kept = sum(each.received + each.sent_back for each in stages if not each.sent)
    kept_losses = min(rules.kept_losses, microbatches)
    fixed = kept * kept_losses + sum(each.received + each.sent for each in stages) * rules.fixed_buffers
    step = _Step(
        {
            "parameters": sum(each.parameters for each in stages),
            "buffers": sum(each.buffers for each in stages),
            "gradients": sum(each.held.get("gradients", 0) for each in stages),
            "buckets": gradients if rules.buckets else sum(each.held.get("buckets", 0) for each in stages),
            "optimizer": sum(each.optimizer.change + each.held.get("optimizer", 0) for each in stages),
            "batch": batch,
            "messages": fixed or sum(each.received + each.sent for each in stages) * microbatches * rules.receive_buffers,
            "activations": 0,
        }
    )
    step.peak(0, "between steps")
    in_buckets = rules.buckets and microbatches == 1
    held = sum(step.now.values()) + (0 if rules.buckets else gradients)
    step.now["gradients"] -= sum(each.freed for each in stages)
    step.now["messages"] -= kept if kept_losses else 0  # the loss of a micro-batch takes the place of an earlier one
    backwards: Counter[int] = Counter()
    on_the_way = last_sent_back = 0
    for kind, index, microbatch in order:
        record = records[index]
        name = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}[kind]
        when = (
            f"{name} of micro-batch {microbatch}, stage {index}" if len(records) > 1 else f"{name} of micro-batch {microbatch}"
        )
        if kind == "W":
            continue
        if kind == "F":
            step.now["messages"] += record.received * rules.holds_received
            step.peak(record.forward.peak, when)
            step.now["activations"] += record.forward.change
            message = record.sent
        else:
            first = not backwards[index]
            backwards[index] += 1
            backward = record.next_backward
            gradient = 0 if rules.fixed_buffers or not rules.holds_received else record.sent
            if record.last_backward is not None:
                backward = (
                    record.last_backward if backwards[index] == microbatches else record.first_backward if first else backward
                )
                step.peak(backward.peak + gradient, when)
                step.now["gradients"] += backward.change + record.forward.change
            elif first and not in_buckets:
                backward = record.first_backward
                step.peak(backward.peak, when)
                step.now["gradients"] += record.gradients
            else:
                step.peak(backward.peak, when)
            step.now["activations"] -= record.forward.change
            step.now["messages"] -= record.received * rules.holds_received
            if rules.holds_received and not rules.fixed_buffers:  # the gradient that was sent last
                step.now["messages"] += record.sent_back - last_sent_back
                last_sent_back = record.sent_back
            message = record.sent_back
            if rules.keeps_sent:
                step.now["messages"] += record.sent + record.sent_back
        if not rules.keeps_sent and rules.receive_buffers and message:
            step.now["messages"] += message - on_the_way
            on_the_way = message
    working = max((each.step.peak if each.step else each.optimizer.peak - each.optimizer.change for each in stages), default=0)
    step.peak(working, "optimizer step")
    return RankMemory(step.best[1], step.best[2], held)
