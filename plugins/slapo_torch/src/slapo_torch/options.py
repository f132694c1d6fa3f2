"""Options of the engine of dialect ``torch``, and their checks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slapo_core import BuildError, UnknownNameError
from slapo_training.options import CommonOptions

from .pipelining.schedules import is_file, kind_of

DATA_PARALLEL = ("ddp", "fsdp")
"""Values of ``data_parallel``."""


@dataclass(frozen=True)
class Options(CommonOptions):
    """The arguments of ``build`` for target ``"torch"``; ``precision`` ``"bf16"`` and ``"fp16"`` are autocast.

    Args:
        loss_scale: Initial factor of the loss with ``"fp16"``. It is halved after an overflow of gradients, whose step is
            skipped, and doubled after 2000 steps without an overflow.
        pipeline_schedule: One of ``schedules.KINDS``, or the path of a CSV file of ``torch.distributed.pipelining``, whose name
            ends in ``.csv``.
        data_parallel: ``"ddp"``: each replica keeps all parameters. ``"fsdp"``: each replica keeps some rows of each parameter,
            gradient and optimizer state, and gathers parameters in a step.
        fsdp_units: Globs of the modules whose parameters are gathered and reduced together; None for the elements of lists of
            layers of one class. All other parameters are one more unit.
        record_timeline: Record start and end of each action of the last step in ``engine.timeline``.
    """

    target: ClassVar[str] = "torch"

    loss_scale: float = 65536.0
    pipeline_schedule: str = "1f1b"
    data_parallel: str = "ddp"
    fsdp_units: Sequence[str] | None = None
    record_timeline: bool = False

    def rank_invariants(self) -> list[str]:
        schedule = f"pipeline_schedule={self.pipeline_schedule!r}"
        if is_file(self.pipeline_schedule):  # its path may differ between ranks
            schedule = f"a pipeline_schedule of crc {zlib.crc32(Path(self.pipeline_schedule).read_bytes()):#x}"
        return [
            f"data_parallel={self.data_parallel!r} with fsdp_units={self.fsdp_units}",
            schedule,
            f"loss_scale={float(self.loss_scale)}",
            *super().rank_invariants(),
        ]

    def validate(self) -> None:
        super().validate()
        kind_of(str(self.pipeline_schedule))
        if self.data_parallel not in DATA_PARALLEL:
            raise BuildError(str(UnknownNameError.of("data_parallel", str(self.data_parallel), DATA_PARALLEL)))
        if self.fsdp_units is not None and self.data_parallel != "fsdp":
            raise BuildError("fsdp_units are for data_parallel='fsdp'; give both, or none")
        if isinstance(self.fsdp_units, str):
            raise BuildError(f"fsdp_units is {self.fsdp_units!r}; give a list of globs, e.g. [{self.fsdp_units!r}]")
        if not isinstance(self.loss_scale, (int, float)) or not 1 <= self.loss_scale < float("inf"):
            raise BuildError(f"loss_scale is {self.loss_scale!r}; give a number from 1 on, e.g. 65536.0")
        if type(self.record_timeline) is not bool:
            raise BuildError(f"record_timeline is {self.record_timeline!r}; give True or False")
