"""Settings of a training run. Imports nothing heavy: the command line reads it before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_core import SlapoError
from slapo_report import format_count

VOCABULARY = 256
"""Number of tokens: the data is read as bytes."""

TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Precision to the largest loss difference to the reference that counts as the same computation."""


ONE_STAGE_PER_RANK = ("1f1b", "gpipe")
"""Values of ``--schedule-kind`` that have one stage on each rank; the others get two."""


_PIPELINE_SCHEDULES = {"deepspeed": ("1f1b",), "megatron": ("1f1b", "interleaved")}
"""Admitted ``schedule_kind`` for targets without such an option, where the number of stages decides it."""


class SettingsError(SlapoError):
    """A flag of ``slapo train`` whose value cannot work; nothing was started."""


@dataclass(frozen=True)
class Settings:
    """The flags of ``slapo train``.

    Args:
        model: Transformers model type, e.g. ``"gpt2"``, or a folder with a ``config.json``, whose sizes the fields hold.
        batch: Sequences in one optimizer step, over all data-parallel ranks.
        microbatches: Equal parts each data-parallel rank cuts its share of the batch into.
        data: Files to read; empty means the Python standard library's source.
        schedule_kind: Order of the micro-batches in the pipeline, as ``pipeline_schedule`` of target ``"torch"``; of other
            targets as their number of stages makes it.
        data_parallel: How data-parallel ranks keep their parameters, as ``data_parallel`` of target ``"torch"``.
        schedule: A Python file with ``def schedule(sch)`` or a saved ``.json``; empty means the default schedule.
        device: ``"cpu"`` or ``"cuda"``.
        report: Folder for ``report.html``, ``schedule.json`` and ``trace.json``; empty writes none.
        build_options: Further options of ``build``, from the schedule file.
    """

    model: str = "gpt2"
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq: int = 128
    dropout: float = 0.0
    batch: int = 8
    microbatches: int = 4
    tp: int = 1
    pp: int = 1
    dp: int = 1
    target: str = "torch"
    data: tuple[str, ...] = ()
    schedule: str = ""
    checkpoint_layers: bool = False
    sequence_parallel: bool = False
    schedule_kind: str = "1f1b"
    data_parallel: str = "ddp"
    precision: str = "fp32"
    steps: int = 30
    seed: int = 0
    lr: float = 1e-3
    device: str = "cpu"
    reference: bool = False
    report: str = ""
    build_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks, row-major over (``pp``, ``dp``, ``tp``)."""
        return self.pp * self.dp * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages of the schedule that is made without a file."""
        return self.pp if self.pp == 1 or self.schedule_kind in ONE_STAGE_PER_RANK else 2 * self.pp

    @property
    def tolerance(self) -> float:
        """Largest loss difference to the reference that passes."""
        return TOLERANCES[self.precision]

    def check(self) -> None:
        """Raise ``SettingsError`` for numbers that do not fit together."""
        for name in ("layers", "hidden", "heads", "seq", "batch", "microbatches", "tp", "pp", "dp", "steps"):
            _check_positive(name, getattr(self, name))
        if self.seq < 2:
            raise SettingsError(f"--seq {self.seq}: nothing to predict in a sequence of one byte; use 2 or more")
        if not 0 < self.lr < float("inf"):
            raise SettingsError(f"--lr {self.lr}: not a learning rate; use a positive number")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"--seed {self.seed}: out of range; use a number from 0 to below 2**63")
        if not 0 <= self.dropout < 1:
            raise SettingsError(f"--dropout {self.dropout}: not a probability; use a value from 0 to below 1")
        if self.hidden % self.heads:
            raise SettingsError(
                f"--heads {self.heads}: --hidden {self.hidden} is not divisible by it; use {_divisors(self.hidden)}"
            )
        parts = self.dp * self.microbatches
        if self.batch % parts:
            raise SettingsError(
                f"--batch {self.batch}: not divisible by {format_count(self.dp, 'data-parallel rank')} x "
                f"{format_count(self.microbatches, 'micro-batch', 'micro-batches')}; "
                f"use a multiple of {parts}"
            )
        if self.data_parallel != "ddp" and self.target != "torch":
            raise SettingsError(f"--data-parallel {self.data_parallel}: target {self.target!r} has no such option; use torch")
        kinds = _PIPELINE_SCHEDULES.get(self.target, (self.schedule_kind,))
        if self.schedule_kind not in kinds:
            raise SettingsError(
                f"--schedule-kind {self.schedule_kind}: target {self.target!r} has {' and '.join(kinds)}; use one of these, or "
                "--target torch"
            )
        if not self.schedule:
            self._check_default_schedule()

    def _check_default_schedule(self) -> None:
        if self.heads % self.tp:
            raise SettingsError(
                f"--tp {self.tp}: {format_count(self.heads, 'head')} cannot be divided among {self.tp} ranks; "
                f"use {_divisors(self.heads)}"
            )
        if self.layers < self.stages:
            raise SettingsError(
                f"--pp {self.pp}: the model has {format_count(self.layers, 'layer')}, fewer than {self.stages} stages; "
                f"use --layers {self.stages} or more, or a smaller --pp"
            )
        if self.sequence_parallel and (self.tp == 1 or self.seq % self.tp):
            parts = f"{self.seq} bytes cannot be divided among" if self.tp > 1 else "there is nothing to split among"
            raise SettingsError(
                f"--sequence-parallel: {parts} {format_count(self.tp, 'tensor-parallel rank')}; "
                "use --tp 2 or more, and a --seq that is divisible by it"
            )


def is_folder(model: str) -> bool:
    """Return True if ``--model`` names a folder of Hugging Face's format and not a model type."""
    return "/" in model or bool(model) and Path(model).is_dir()


def engine_options(settings: Settings) -> dict[str, Any]:
    """Return the options of ``build`` other than the optimizer: those of every target, those of ``torch``, and the file's."""
    options: dict[str, Any] = {"microbatches": settings.microbatches, "precision": settings.precision}
    if settings.target == "torch":
        options |= {"pipeline_schedule": settings.schedule_kind, "data_parallel": settings.data_parallel}
        options["record_timeline"] = bool(settings.report)
    return {**options, **settings.build_options}


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise SettingsError(f"--{name} {value}: not a positive number; use 1 or more")


def _divisors(number: int) -> str:
    found: list[Any] = [n for n in range(1, number + 1) if number % n == 0]
    return ", ".join(map(str, found[:-1])) + f" or {found[-1]}" if len(found) > 1 else "1"
