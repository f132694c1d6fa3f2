"""Record of a run: everything the report shows, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from slapo_core import Step

from .settings import Settings
from .versions import versions


@dataclass(frozen=True)
class ModuleRecord:
    """One module of the unmodified model.

    Args:
        path: Dotted path; ``""`` is the model.
        kind: Class name.
        params: Parameters in it and below, ties counted once.
    """

    path: str
    kind: str
    params: int


@dataclass(frozen=True)
class ScheduleStepRecord:
    """One step of the schedule, or one that such a step took itself (``depth`` 1 and more)."""

    path: str
    name: str
    call: str
    provider: str
    depth: int = 0


@dataclass(frozen=True)
class RankRecord:
    """Stages and parameters of one rank.

    Args:
        stages: Indices of the pipeline stages it runs.
        params: Number of elements of the parameters on this rank, as sharded.
    """

    rank: int
    pp: int
    dp: int
    tp: int
    stages: tuple[int, ...]
    params: int


@dataclass
class RunRecord:
    """One training run.

    Args:
        stage_paths: Modules of the model each stage runs.
        losses: Of the scheduled model, one per step.
        seconds: Wall time of the steps.
        reference: Losses of the unmodified model; empty when it was not trained.
        timeline: Of the last step, on all ranks; see ``slapo_torch``'s ``TorchEngine.timeline``.
    """

    settings: Settings
    modules: list[ModuleRecord]
    steps: list[ScheduleStepRecord]
    stage_paths: list[tuple[str, ...]]
    ranks: list[RankRecord]
    source: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    reference: list[float] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def differences(self) -> list[float]:
        """Absolute difference of the two losses per step; empty without a reference."""
        return [abs(own - other) for own, other in zip(self.losses, self.reference, strict=False)]

    @property
    def largest_difference(self) -> tuple[float, int]:
        """The largest difference and its step, counted from 1; a loss that is not a number counts as infinitely far."""
        ranked = [(value if value == value else float("inf"), step) for step, value in enumerate(self.differences, 1)]
        return max(ranked, key=lambda entry: entry[0])

    @property
    def is_within_tolerance(self) -> bool:
        """True if the losses equal the reference's within the tolerance."""
        return self.largest_difference[0] <= self.settings.tolerance

    @property
    def is_refuted(self) -> bool:
        """True if the losses differ from the reference's; never with dropout, as the masks differ."""
        return bool(self.reference) and not self.settings.dropout and not self.is_within_tolerance


def module_records(model: nn.Module) -> list[ModuleRecord]:
    """All modules of a model that is not scheduled yet, parents first."""
    return [
        ModuleRecord(path, type(module).__name__, sum(p.numel() for p in module.parameters()))
        for path, module in model.named_modules()
    ]


def step_records(steps: tuple[Step, ...], depth: int = 0) -> list[ScheduleStepRecord]:
    """The steps of a journal, each followed by the steps it took itself."""
    records = []
    for step in steps:
        records.append(ScheduleStepRecord(step.path, step.name, str(step), step.provider, depth))
        records += step_records(step.children, depth + 1)
    return records
