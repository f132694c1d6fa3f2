"""The dialect ``deepspeed``, and the parser of the numbers that DeepSpeed prints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from slapo_training.engines import EngineDialect, Limit, log_fields

from .configuration.limits import LIMITS
from .configuration.options import DeepSpeedOptions
from .engine import DeepSpeedEngine
from .pipeline import RunningStage
from .step_model import DeepSpeedStepModel

_FIELDS = {
    "loss": re.compile(r"\bsteps: (?P<step>\d+) loss: (?P<value>\S+)"),
    "samples_per_second": re.compile(r"\bsteps: (?P<step>\d+) .*\bsamples/sec: (?P<value>[\d.]+)"),
    "learning_rate": re.compile(r"\bstep=(?P<step>\d+), skipped=\d+, lr=\[(?P<value>[^,\]]+)"),
    "skipped": re.compile(r"\bstep=(?P<step>\d+), skipped=(?P<value>\d+)"),
    "current_samples_per_second": re.compile(r"/global_step=(?P<step>\d+), .*\bCurrSamplesPerSec=(?P<value>[\d.]+)"),
}


class LoggedStep(NamedTuple):
    """Numbers printed for one step; None for each that was not printed.

    Args:
        step: Counted from 1.
        loss: Mean over the batch; pipelines print it.
        samples_per_second: Rows a second over all replicas.
        learning_rate: Learning rate of the first parameter group.
        skipped: Number of earlier steps skipped because gradients overflowed.
    """

    step: int
    loss: float | None = None
    samples_per_second: float | None = None
    learning_rate: float | None = None
    skipped: int | None = None


class DeepSpeedLog:
    """Parser of the lines that DeepSpeed prints with ``steps_per_print`` in its config.

    Pipelines print the loss. Other engines log at ``INFO``, which ``deepspeed.utils.logger`` omits by default.
    """

    @staticmethod
    def parse(lines: Iterable[str]) -> list[LoggedStep]:
        """Return the printed steps in order; other lines are ignored.

        Args:
            lines: Lines of a log of one or several ranks.
        """
        return [_step(number, values) for number, values in log_fields(lines, _FIELDS).items()]


def _step(number: int, values: dict[str, float]) -> LoggedStep:
    speed = values.get("samples_per_second", values.get("current_samples_per_second"))
    skipped = values.get("skipped")
    return LoggedStep(number, values.get("loss"), speed, values.get("learning_rate"), None if skipped is None else int(skipped))


class DeepSpeedDialect(EngineDialect):
    """DeepSpeed: ZeRO, mixed precision with fp32 master weights, and its pipeline engine."""

    name = "deepspeed"
    capabilities = frozenset(
        {"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16", "precision:fp16"}
    )
    classes: ClassVar[dict[str, type]] = {
        "runtime_engine": DeepSpeedEngine,
        "pipeline_engine": DeepSpeedEngine,
        "pipeline_stage": RunningStage,
        "log_parser": DeepSpeedLog,
        "step_model": DeepSpeedStepModel,
    }
    distribution = "deepspeed"
    tested = "0.19.8"
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    options_class = DeepSpeedOptions
