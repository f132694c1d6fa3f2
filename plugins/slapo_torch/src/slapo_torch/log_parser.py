"""What ``slapo train`` printed of a run, as numbers; the engine itself prints nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_STEP = re.compile(r"(?P<run>[\w-]+): step (?P<step>\d+)/\d+, loss (?P<loss>\S+)")


class LoggedStep(NamedTuple):
    """What was printed of one step.

    Args:
        step: Counted from 1.
        loss: Mean over the batch, to four decimals.
    """

    step: int
    loss: float


class TorchLog:
    """Reads the lines that ``slapo train`` prints where its output is no terminal: about ten of a run."""

    @staticmethod
    def parse(lines: Iterable[str], run: str = "training") -> list[LoggedStep]:
        """The steps that were printed, in order; other lines are passed over.

        Args:
            lines: Of a log, of one rank or of several.
            run: ``"training"``, or ``"reference"`` for the unmodified model beside it.
        """
        matches = (_STEP.search(line) for line in lines)
        found = {int(match["step"]): float(match["loss"]) for match in matches if match and match["run"] == run}
        return [LoggedStep(step, found[step]) for step in sorted(found)]
