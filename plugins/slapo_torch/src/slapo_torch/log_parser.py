"""Parser of the lines that ``slapo train`` prints; the engine itself prints nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_STEP = re.compile(r"(?P<run>[\w-]+): step (?P<step>\d+)/\d+, loss (?P<loss>\S+)")


class LoggedStep(NamedTuple):
    """One printed step.

    Args:
        step: Number of the step, from 1.
        loss: Mean loss over the batch, with four decimals.
    """

    step: int
    loss: float


class TorchLog:
    """Parses the lines that ``slapo train`` prints without a terminal: about ten per run."""

    @staticmethod
    def parse(lines: Iterable[str], run: str = "training") -> list[LoggedStep]:
        """Return the printed steps in order; other lines are skipped.

        Args:
            lines: Lines of a log of one or several ranks.
            run: ``"training"``, or ``"reference"`` for the unmodified model beside it.
        """
        matches = (_STEP.search(line) for line in lines)
        found = {int(match["step"]): float(match["loss"]) for match in matches if match and match["run"] == run}
        return [LoggedStep(step, found[step]) for step in sorted(found)]
