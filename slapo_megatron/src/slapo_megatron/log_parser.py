"""Parser of the numbers that Megatron's training script prints during a run."""

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
