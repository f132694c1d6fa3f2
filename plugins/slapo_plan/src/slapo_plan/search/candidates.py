"""Costs of each layout, and the schedule that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_core import Schedule, SlapoError

from ..records import CollectiveRecord
from .layouts import Layout, Rejection
from .model_record import ModelRecord
from .stage_costs import PartSeconds, StageCost, stage_costs

GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its costs.

    Args:
        layout: The layout.
        stages: Cost of each pipeline stage.
        step_seconds: Predicted seconds of a step.
        bubble: Share of the time in which ranks wait for the pipeline.
        flops: Floating-point operations of a step over all ranks, without recomputation.
        mfu: Share of the peak FLOP/s of all devices, recomputation not counted.
        paths: Paths of the blocks.
        options: Further options of ``build``.
    """

    layout: Layout
    stages: tuple[StageCost, ...]
    step_seconds: float
    bubble: float
    flops: int
    mfu: float
    paths: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def peak(self) -> int:
        """Most bytes of any rank."""
        return max(each.peak for each in self.stages)

    @property
    def settings(self) -> dict[str, Any]:
        """The layout and the number of recomputed blocks, as plain data."""
        return {**self.layout._asdict(), "checkpointed": sum(each.checkpointed for each in self.stages)}

    @property
    def build_options(self) -> dict[str, Any]:
        """Options of ``build`` for target ``"torch"``."""
        found: dict[str, Any] = {"microbatches": self.layout.microbatches, **self.options}
        if self.layout.dp > 1:
            found["data_parallel"] = self.layout.data_parallel
        if self.layout.pp > 1:
            found["pipeline_schedule"] = self.layout.pipeline_schedule
        return found

    def steps(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return the steps of the schedule: path, primitive and arguments."""
        found: list[tuple[str, str, dict[str, Any]]] = []
        if self.layout.tp > 1:
            arguments = {"sequence_parallel": True} if self.layout.sequence_parallel else {}
            found.append(("", "tensor_parallel", arguments))
        begin = 0
        for index, stage in enumerate(self.stages):
            own = self.paths[begin : begin + stage.blocks]
            found += [(path, "checkpoint", {}) for path in own[: stage.checkpointed]]
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
            f'"""{self.layout}: predicted step of {self.step_seconds:.3g} s, {self.peak / GIB:.2f} GiB on the fullest rank."""',
            "",
            f"layout = {layout!r}",
            f"build = {self.build_options!r}",
        ]
        head += [f"model = {dict(model)!r}"] if model else []
        try:
            Path(path).write_text("\n".join([*head, "", "", *lines, ""]), encoding="utf-8")
        except OSError as err:
            raise SlapoError(f"plan: the schedule {str(path)!r} cannot be written: {err.strerror}") from err

    def __str__(self) -> str:
        checkpointed = sum(each.checkpointed for each in self.stages)
        words = [str(self.layout), f"{checkpointed} of {len(self.paths)} blocks recomputed"]
        words += [
            f"{self.peak / GIB:.2f} GiB",
            f"{self.step_seconds:.4g} s",
            f"bubble {self.bubble:.1%}",
            f"MFU {self.mfu:.1%}",
        ]
        return ", ".join(words)


def candidate_of(
    record: ModelRecord, layout: Layout, seconds: PartSeconds, options: Mapping[str, Any], dtype: Any
) -> Candidate | Rejection:
    """Return what a layout costs, or why it does not fit.

    Args:
        record: The model for ``layout.rows`` rows and ``layout.tp`` ranks.
        layout: The layout.
        seconds: Seconds on the device.
        options: Further options of ``build``.
        dtype: Type in which matrices are multiplied, for the MFU.
    """
    stages = stage_costs(record, layout, seconds)
    limit = seconds.hardware.usable_bytes
    fullest = max(range(len(stages)), key=lambda index: stages[index].peak)
    if stages[fullest].peak > limit:
        return Rejection(str(layout), _too_large(stages, fullest, limit))
    step, bubble = _step(record, layout, stages, seconds)
    total = seconds.flops(record) * layout.microbatches * layout.dp * layout.tp
    ranks = layout.pp * layout.dp * layout.tp
    mfu = total / (step * ranks * seconds.hardware.peak_flops(dtype)) if step else 0.0
    return Candidate(layout, tuple(stages), step, bubble, total, mfu, record.paths, options)


def _too_large(stages: Sequence[StageCost], index: int, limit: int) -> str:
    stage = stages[index]
    place = f"stage {index}" if len(stages) > 1 else "a rank"
    return (
        f"{place} needs {stage.peak / GIB:.1f} GiB of {limit / GIB:.1f} GiB with "
        f"{'all' if stage.checkpointed == stage.blocks else stage.checkpointed} of its {stage.blocks} blocks recomputed"
    )


def _step(record: ModelRecord, layout: Layout, stages: Sequence[StageCost], seconds: PartSeconds) -> tuple[float, float]:
    """Return the seconds of a step and its bubble under 1F1B."""
    passes = [each.forward + each.backward for each in stages]
    message = 0.0
    if layout.pp > 1:
        ends = (0, layout.dp * layout.tp)
        message = 2 * seconds.collective(CollectiveRecord("send", record.before.output, ends))
    slowest = max(passes) + message
    pipeline = sum(passes) + (layout.pp - 1) * message + (layout.microbatches - 1) * slowest
    bubble = 1 - layout.microbatches * sum(passes) / (layout.pp * pipeline) if pipeline else 0.0
    return pipeline + max(each.after for each in stages), bubble
