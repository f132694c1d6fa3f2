"""The dialect ``megatron``, and the parser of the numbers that Megatron's training script prints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from slapo_training.engines import EngineDialect, Limit, log_fields

from .configuration.limits import LIMITS
from .configuration.options import MegatronOptions
from .engine import MegatronEngine
from .pipeline import RunningStage
from .step_model import MegatronStepModel

_WORDS = {
    "loss": "lm loss",
    "milliseconds": r"elapsed time per iteration \(ms\)",
    "learning_rate": "learning rate",
    "grad_norm": "grad norm",
    "batch_size": "global batch size",
    "skipped": "number of skipped iterations",
}
_FIELDS = {name: re.compile(rf"\biteration\s+(?P<step>\d+)\s*/.*\b{words}:\s*(?P<value>\S+)") for name, words in _WORDS.items()}
_COUNTS = ("skipped", "batch_size")


class LoggedStep(NamedTuple):
    """Numbers printed for one step; None for each that was not printed.

    Args:
        step: Counted from 1.
        loss: Mean over the batch.
        seconds: Mean time of a step since the previous line.
        learning_rate: Learning rate of the first parameter group.
        grad_norm: Gradient norm before clipping.
        skipped: Number of steps since the previous line skipped because gradients overflowed.
        batch_size: Rows a step over all replicas.
    """

    step: int
    loss: float | None = None
    seconds: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    skipped: int | None = None
    batch_size: int | None = None


class MegatronLog:
    """Parser of the lines of Megatron-LM's training loop; megatron-core itself prints none."""

    @staticmethod
    def parse(lines: Iterable[str]) -> list[LoggedStep]:
        """Return the printed steps in order; other lines are ignored.

        Args:
            lines: Lines of a log of one or several ranks.
        """
        return [_step(number, values) for number, values in log_fields(lines, _FIELDS).items()]


def _step(number: int, values: dict[str, float]) -> LoggedStep:
    found: dict[str, Any] = {name: int(value) if name in _COUNTS else value for name, value in values.items()}
    if (milliseconds := found.pop("milliseconds", None)) is not None:
        found["seconds"] = milliseconds / 1000
    return LoggedStep(number, **found)


class MegatronDialect(EngineDialect):
    """Megatron-Core: its data parallelism, distributed optimizer, and 1F1B and interleaved pipelines."""

    name = "megatron"
    capabilities = frozenset({"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16"})
    classes: ClassVar[dict[str, type]] = {
        "runtime_engine": MegatronEngine,
        "pipeline_engine": MegatronEngine,
        "pipeline_stage": RunningStage,
        "log_parser": MegatronLog,
        "step_model": MegatronStepModel,
    }
    distribution = "megatron-core"
    tested = "0.16.1"
    limits: ClassVar[tuple[Limit, ...]] = LIMITS
    options_class = MegatronOptions
