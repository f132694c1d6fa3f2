"""Costs of each layout, and the schedule that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slapo_core import Schedule, SlapoError
from slapo_report import format_bytes
from slapo_training import MessageMode

from ..estimation.result import Estimate
from ..records import CollectiveRecord
from ..simulation import run_pipeline
from .engine_facts import EngineFacts
from .layouts import Layout, Rejection, Step
from .model_measurement import CHECKPOINTS
from .model_record import ModelRecord
from .part_seconds import PartSeconds
from .stage_costs import StageCost, seconds_after, stage_costs


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its costs.

    Args:
        layout: The layout.
        stages: Cost of each pipeline stage.
        step_seconds: Predicted seconds of a step.
        bubble: Share of the time in which ranks wait for the pipeline.
        flops: Floating-point operations of a step over all ranks, recomputation not counted.
        mfu: Share of the peak FLOP/s of all devices, recomputation not counted.
        paths: Paths of the blocks.
        build_options: Options of ``build``.
        target: Name of the dialect.
        is_estimated: True if memory and seconds are those of the estimate of its real schedule.
    """

    layout: Layout
    stages: tuple[StageCost, ...]
    step_seconds: float
    bubble: float
    flops: int
    mfu: float
    paths: tuple[str, ...]
    build_options: Mapping[str, Any]
    target: str = "torch"
    is_estimated: bool = False

    def with_estimate(self, exact: Estimate) -> Candidate:
        """Return the candidate with the memory and the seconds of the estimate of its schedule."""
        peaks = {each.rank: each.memory.peak for each in exact.ranks}
        stages = tuple(replace(each, peak=peaks[each.rank]) for each in self.stages)
        assert exact.time is not None
        seconds, bubble = exact.time.seconds, exact.time.bubble
        return replace(self, stages=stages, step_seconds=seconds, bubble=bubble, mfu=exact.mfu or 0.0, is_estimated=True)

    def with_seconds_times(self, ratio: float) -> Candidate:
        """Return the candidate with its seconds times a ratio."""
        return replace(self, step_seconds=self.step_seconds * ratio, mfu=self.mfu / ratio)

    @property
    def peak(self) -> int:
        """Most bytes of any rank."""
        return max(each.peak for each in self.stages)

    @property
    def after(self) -> float:
        """Seconds behind the last backward: gradient reduction that no backward hides, and the optimizer."""
        return seconds_after(self.stages)

    @property
    def policies(self) -> tuple[str, ...]:
        """Checkpoint policy of each block, ``"none"`` where it keeps everything."""
        return tuple(policy for stage in self.stages for policy in stage.policies)

    @property
    def settings(self) -> dict[str, Any]:
        """The layout and the number of recomputed blocks, as plain data."""
        return {**self.layout._asdict(), "checkpointed": sum(each.num_checkpointed for each in self.stages)}

    def steps(self) -> list[Step]:
        """Return the steps of the schedule."""
        found = self.layout.form.steps()
        begin = 0
        for index, stage in enumerate(self.stages):
            own = self.paths[begin : begin + stage.blocks]
            for path, policy in zip(own, stage.policies, strict=True):
                if policy != "none":
                    found.append((path, "checkpoint", dict(CHECKPOINTS[policy])))
            if index + 1 < len(self.stages):
                found.append((own[-1], "cut_pipeline_stage", {}))
            begin += stage.blocks
        return found

    def apply(self, sch: Schedule) -> Schedule:
        """Take the steps on a schedule of the unmodified model, on a mesh of this layout.

        Raises:
            ScheduleError: a step is refused; those before it are undone.
        """
        before = len(sch.journal)
        try:
            for path, name, arguments in self.steps():
                sch[path].apply(name, **arguments)
        except SlapoError:
            while len(sch.journal) > before:
                sch.undo()
            raise
        return sch

    def save(self, path: str | Path, model: Mapping[str, Any] | None = None) -> None:
        """Write the schedule as a Python file, which ``load_schedule`` and ``slapo train --schedule`` run.

        Args:
            path: The file.
            model: Flags of ``slapo train`` for the model and its batch, written as ``model = {...}``.

        Raises:
            SlapoError: the path does not end in ``.py``, or cannot be written.
        """
        if not str(path).endswith(".py"):
            raise SlapoError(f"plan: the schedule {str(path)!r} does not end in .py; give such a path")
        lines = ["def schedule(sch):"]
        for place, name, arguments in self.steps():
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            lines.append(f"    sch{f'[{place!r}]' if place else ''}.{name}({given})")
        lines += ["    pass"] * (len(lines) == 1)
        layout = {axis: getattr(self.layout, axis) for axis in ("pp", "dp", "tp")}
        head = [
            f'"""{self.layout}: predicted step of {self.step_seconds:.3g} s, {format_bytes(self.peak)} on the fullest rank."""',
            "",
            f"layout = {layout!r}",
            f"build = {dict(self.build_options)!r}",
        ]
        head += [f"target = {self.target!r}"] if self.target != "torch" else []
        head += [f"model = {dict(model)!r}"] if model else []
        try:
            Path(path).write_text("\n".join([*head, "", "", *lines, ""]), encoding="utf-8")
        except OSError as err:
            raise SlapoError(f"plan: the schedule {str(path)!r} cannot be written: {err.strerror}") from err

    def __str__(self) -> str:
        checkpointed = sum(each.num_checkpointed for each in self.stages)
        words = [str(self.layout), f"{checkpointed} of {len(self.paths)} blocks recomputed"]
        words += [
            format_bytes(self.peak),
            f"{self.step_seconds:.4g} s",
            f"bubble {self.bubble:.1%}",
            f"MFU {self.mfu:.1%}",
        ]
        return ", ".join(words)


def candidate_of(
    record: ModelRecord,
    layout: Layout,
    facts: EngineFacts,
    seconds: PartSeconds,
    options: Mapping[str, Any],
    target: str,
    *,
    growth: float = 1.0,
    solves: bool = False,
    policy: str = "",
) -> Candidate | Rejection:
    """Return what a layout costs, or why it does not fit.

    Args:
        record: The model for ``layout.rows`` rows and ``layout.tp`` ranks.
        layout: The layout.
        facts: What the engine tells of its step.
        seconds: Seconds on the device.
        options: Options of ``build``.
        target: Name of the dialect.
        growth: As in ``stage_costs``.
        solves: As in ``stage_costs``.
        policy: As in ``stage_costs``.
    """
    stages = stage_costs(record, layout, facts, seconds, growth=growth, solves=solves, policy=policy)
    limit = seconds.hardware.usable_bytes
    fullest = max(range(len(stages)), key=lambda index: stages[index].peak)
    if stages[fullest].peak > limit:
        missing = stages[fullest].peak - limit
        return Rejection(layout._asdict(), _too_large(stages, fullest, limit, policy), missing)
    step, bubble = _step(record, layout, stages, seconds, facts.messages)
    total = seconds.flops(record) * layout.microbatches * layout.dp * layout.tp
    ranks = layout.pp * layout.dp * layout.tp
    mfu = total / (step * ranks * seconds.peak_flops(record)) if step else 0.0
    return Candidate(layout, tuple(stages), step, bubble, total, mfu, record.paths, options, target)


def _too_large(stages: Sequence[StageCost], index: int, limit: int, policy: str) -> str:
    own = [each for each in stages if each.rank == stages[index].rank]
    blocks, full = sum(each.blocks for each in own), sum(each.policies.count("full") for each in own)
    place = "a rank" if len(own) == len(stages) else f"rank {stages[index].rank} of the pipeline"
    recomputed = "all" if full == blocks else full
    how = f"{recomputed} of its {blocks} blocks recomputed"
    if policy:
        how = "no block recomputed" if policy == "none" else f"the checkpoint policy {policy!r} on all of its blocks"
    return f"{place} needs {format_bytes(stages[index].peak)} of {format_bytes(limit)} with {how}"


def _step(
    record: ModelRecord, layout: Layout, stages: Sequence[StageCost], seconds: PartSeconds, mode: MessageMode
) -> tuple[float, float]:
    """Return the seconds of a step and its bubble, as if every rank waited as long as under (interleaved) 1F1B.

    Overlapped messages of a steady micro-batch take time only beyond that of its computation.
    """
    work = [0.0] * layout.pp
    for each in stages:
        work[each.rank] += each.forward + each.backward
    message = _message(record, layout, seconds)
    per_rank = len(stages) // layout.pp
    sent = message * per_rank  # both ways
    slowest = max(max(work), sent / 2) if mode == "overlapped" else max(work) + sent
    filling = (sum(work) - max(work)) / per_rank + (layout.pp - 1) * message
    pipeline = layout.microbatches * slowest + filling
    bubble = 1 - layout.microbatches * sum(work) / (layout.pp * pipeline) if pipeline else 0.0
    return pipeline + seconds_after(stages), max(0.0, bubble)


def _message(record: ModelRecord, layout: Layout, seconds: PartSeconds) -> float:
    """Return the seconds of one tensor to the next stage and of its gradient back."""
    if layout.pp == 1:
        return 0.0
    ends = 0, layout.dp * layout.tp
    sizes = record.middle.received, record.middle.sent_back
    return sum(seconds.collective(CollectiveRecord("send", size, ends)) for size in sizes)


def replay(candidate: Candidate, record: ModelRecord, facts: EngineFacts, seconds: PartSeconds) -> Candidate:
    """Return a candidate with the step time of its order of actions; steady micro-batches beyond those of the order are added.

    Args:
        candidate: The candidate.
        record: The model for its rows.
        facts: What the engine tells of its step.
        seconds: Seconds on the device.
    """
    layout, stages = candidate.layout, candidate.stages
    if layout.pp == 1:
        return candidate
    half = _message(record, layout, seconds) / 2
    costs: dict[tuple[int, str], float] = {}
    for index, each in enumerate(stages):
        weights = each.backward * _share_of_weights(candidate, record, index, seconds)
        costs |= {(index, "F"): each.forward, (index, "B"): each.backward}
        costs |= {(index, "I"): each.backward - weights, (index, "W"): weights}
    pairs = [(index, index + 1) for index in range(len(stages) - 1) if stages[index].rank != stages[index + 1].rank]
    messages = {pair: half for one, other in pairs for pair in ((one, other), (other, one))}
    run = run_pipeline(facts.order, costs, messages, facts.messages)
    ran = max(action.microbatch for action in facts.order[0]) + 1
    work = [sum(each.forward + each.backward for each in stages if each.rank == rank) for rank in range(layout.pp)]
    pipeline = run.seconds + (layout.microbatches - ran) * max(work)
    step = pipeline + seconds_after(stages)
    bubble = 1 - layout.microbatches * sum(work) / (layout.pp * pipeline) if pipeline else 0.0
    return replace(candidate, step_seconds=step, bubble=bubble, mfu=candidate.mfu * candidate.step_seconds / step)


def _share_of_weights(candidate: Candidate, record: ModelRecord, index: int, seconds: PartSeconds) -> float:
    """Return the share of a stage's backward that computes gradients of parameters; recomputation is in the other part."""
    begin = sum(each.blocks for each in candidate.stages[:index])
    weights = backward = 0.0
    for block, policy in enumerate(candidate.stages[index].policies, begin):
        weights += seconds(record.blocks["none"][block].next_weights)
        backward += seconds(record.blocks[policy][block].next_backward)
    return min(1.0, weights / backward) if weights and backward else 0.5
