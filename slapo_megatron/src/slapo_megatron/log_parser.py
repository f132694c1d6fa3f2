"""Log parser: what Megatron's training script printed of a run, as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from slapo_training.engines import log_fields

_WORDS = {
    "loss": "lm loss",
    "milliseconds": r"elapsed time per iteration \(ms\)",
    "learning_rate": "learning rate",
    "grad_norm": "grad norm",
    "batch_size": "global batch size",
    "skipped": "number of skipped iterations",
}
_FIELDS = {name: re.compile(rf"\biteration\s+(?P<step>\d+)\s*/.*\b{words}:\s*(?P<value>\S+)") for name, words in _WORDS.items()}


class LoggedStep(NamedTuple):
    """Numbers that were printed of one step; None for those that were not.

    Args:
        step: Counted from 1.
        loss: Mean over the batch.
        seconds: That a step took, mean since the line before.
        learning_rate: Of the first group of parameters.
        grad_norm: Before clipping.
        skipped: How many steps since the line before were left out, as gradients overflowed.
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
    """Reads the lines of Megatron-LM's training loop; megatron-core itself prints none."""

    @staticmethod
    def parse(lines: Iterable[str]) -> list[LoggedStep]:
        """The steps that were printed, in order; other lines are passed over.

        Args:
            lines: Of a log, of one rank or of several.
        """
        return [_step(number, values) for number, values in log_fields(lines, _FIELDS).items()]


def _step(number: int, values: dict[str, float]) -> LoggedStep:
    milliseconds, skipped, batch_size = (values.get(name) for name in ("milliseconds", "skipped", "batch_size"))
    return LoggedStep(
        number,
        values.get("loss"),
        None if milliseconds is None else milliseconds / 1000,
        values.get("learning_rate"),
        values.get("grad_norm"),
        None if skipped is None else int(skipped),
        None if batch_size is None else int(batch_size),
    )
