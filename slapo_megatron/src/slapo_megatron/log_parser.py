"""Log parser: what Megatron's training script printed of a run, as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_STEP = re.compile(r"\biteration\s+(?P<step>\d+)\s*/")
_FIELDS = {
    "loss": re.compile(r"\blm loss:\s*(?P<value>\S+)"),
    "seconds": re.compile(r"\belapsed time per iteration \(ms\):\s*(?P<value>\S+)"),
    "learning_rate": re.compile(r"\blearning rate:\s*(?P<value>\S+)"),
    "grad_norm": re.compile(r"\bgrad norm:\s*(?P<value>\S+)"),
    "batch_size": re.compile(r"\bglobal batch size:\s*(?P<value>\d+)"),
    "skipped": re.compile(r"\bnumber of skipped iterations:\s*(?P<value>\d+)"),
}


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
        found: dict[int, LoggedStep] = {}
        for line in lines:
            if (match := _STEP.search(line)) is not None:
                step = int(match["step"])
                found[step] = _step(step, dict(_values(line)))
        return [found[step] for step in sorted(found)]


def _values(line: str) -> Iterable[tuple[str, float]]:
    for name, pattern in _FIELDS.items():
        if (match := pattern.search(line)) is not None:
            yield name, float(match["value"])


def _step(number: int, values: dict[str, float]) -> LoggedStep:
    seconds, skipped, batch_size = (values.get(name) for name in ("seconds", "skipped", "batch_size"))
    return LoggedStep(
        number,
        values.get("loss"),
        None if seconds is None else seconds / 1000,
        values.get("learning_rate"),
        values.get("grad_norm"),
        None if skipped is None else int(skipped),
        None if batch_size is None else int(batch_size),
    )
