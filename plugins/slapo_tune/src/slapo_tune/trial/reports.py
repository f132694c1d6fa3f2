"""Throughputs that a trial prints while it still runs, and the decision to stop it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from .throughput import invalid_throughput, printed_result


@dataclass(frozen=True)
class TrialReport:
    """Throughput of a trial after some of its steps.

    Args:
        step: Number of the step, from 0.
        throughput: Samples a second until this step.
        interval: 95 % interval of ``throughput``; None if the trial does not know it.
        line: All of the line of JSON.
    """

    step: int
    throughput: float
    interval: tuple[float, float] | None = None
    line: Mapping[str, Any] = field(default_factory=dict)


Prune = Callable[[TrialReport], str]
"""Takes a report; returns the sentence of a trial that is to be stopped, ``""`` if it goes on."""


class ReportReader:
    """Reader of the reports in a trial's output. A report is a line of JSON with a throughput and ``"step"``, a whole number.

    Args:
        prune: Decides about each report, in order.

    Attributes:
        last: The report that stopped the trial.
        sentence: Its sentence; ``""`` for a trial that was not stopped.
    """

    def __init__(self, prune: Prune) -> None:
        self._prune = prune
        self._position = 0
        self._rest = b""
        self.last: TrialReport | None = None
        self.sentence = ""

    def read(self, file: IO[bytes], limit: int) -> bool:
        """Read what was written since the last call, at most ``limit`` bytes of it; return True to stop the trial.

        The position of the file stays, since the trial's processes write there.
        """
        while not self.sentence and (data := os.pread(file.fileno(), limit, self._position)):
            self._position += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if (report := printed_report(line.decode(errors="replace"))) and (sentence := self._prune(report)):
                    self.last, self.sentence = report, sentence
                    break
        return bool(self.sentence)


def printed_report(line: str) -> TrialReport | None:
    """Return the report that a line of output is, or None."""
    found = printed_result([line]) if '"step"' in line else None
    if found is None or type(step := found.get("step")) is not int or step < 0 or invalid_throughput(found["throughput"]):
        return None
    return TrialReport(step, float(found["throughput"]), interval_of(found.get("interval")), found)


def interval_of(value: Any) -> tuple[float, float] | None:
    """Return a printed interval, or None if it is none."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and not any(map(invalid_throughput, value)):
        return float(value[0]), float(value[1])
    return None
