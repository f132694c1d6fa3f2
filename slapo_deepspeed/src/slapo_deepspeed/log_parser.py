"""What DeepSpeed printed of a run, as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from slapo_training.engines import log_fields

_FIELDS = {
    "loss": re.compile(r"\bsteps: (?P<step>\d+) loss: (?P<value>\S+)"),
    "samples_per_second": re.compile(r"\bsteps: (?P<step>\d+) .*\bsamples/sec: (?P<value>[\d.]+)"),
    "learning_rate": re.compile(r"\bstep=(?P<step>\d+), skipped=\d+, lr=\[(?P<value>[^,\]]+)"),
    "skipped": re.compile(r"\bstep=(?P<step>\d+), skipped=(?P<value>\d+)"),
    "current_samples_per_second": re.compile(r"/global_step=(?P<step>\d+), .*\bCurrSamplesPerSec=(?P<value>[\d.]+)"),
}


class LoggedStep(NamedTuple):
    """What was printed of one step; what was not is None.

    Args:
        step: Counted from 1.
        loss: Mean over the batch; pipelines print it.
        samples_per_second: Rows a second over all replicas.
        learning_rate: Of the first group of parameters.
        skipped: How many steps before it were left out, as gradients overflowed.
    """

    step: int
    loss: float | None = None
    samples_per_second: float | None = None
    learning_rate: float | None = None
    skipped: int | None = None


class DeepSpeedLog:
    """Reads the lines that DeepSpeed prints with ``steps_per_print`` in its config: pipelines print the loss, other engines log
    at ``INFO``, which ``deepspeed.utils.logger`` leaves out unless told otherwise."""

    @staticmethod
    def parse(lines: Iterable[str]) -> list[LoggedStep]:
        """The steps that were printed, in order; other lines are passed over.

        Args:
            lines: Of a log, of one rank or of several.
        """
        return [_step(number, values) for number, values in log_fields(lines, _FIELDS).items()]


def _step(number: int, values: dict[str, float]) -> LoggedStep:
    speed = values.get("samples_per_second", values.get("current_samples_per_second"))
    skipped = values.get("skipped")
    return LoggedStep(number, values.get("loss"), speed, values.get("learning_rate"), None if skipped is None else int(skipped))
