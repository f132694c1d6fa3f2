"""Repeated measurement of a training step until the interval of its median is narrow enough."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .job import MeasurementSettings

LEAST_STEPS = 6
"""Fewest steps whose smallest and largest seconds hold the median with a probability of 95 %."""

REPORT_GROWTH = 1.5
"""Factor between the numbers of steps after which a trial reports, so that the tuner leaves the processors to the trial."""


@dataclass(frozen=True)
class StepMeasurement:
    """Seconds of a training step.

    Args:
        seconds: The median.
        interval: 95 % interval of the median; None with fewer than ``LEAST_STEPS`` steps.
        steps: Steps that were measured.
    """

    seconds: float
    interval: tuple[float, float] | None
    steps: int

    def is_narrow(self, precision: float) -> bool:
        """Return True if the half width of the interval, relative to the median, is at most ``precision``."""
        return self.interval is not None and (self.interval[1] - self.interval[0]) / 2 <= precision * self.seconds


def median_interval(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median, from order statistics, whatever the distribution; None for too few values."""
    number = len(seconds)
    if number < LEAST_STEPS:
        return None
    place = max(0, math.floor((number - 1.96 * math.sqrt(number)) / 2))
    ordered = sorted(seconds)
    return ordered[place], ordered[number - 1 - place]


def time_steps(
    step: Callable[[], None],
    settings: MeasurementSettings,
    report: Callable[[StepMeasurement], None],
    agree: Callable[[bool], bool],
) -> StepMeasurement:
    """Run steps until their median is known well enough.

    Args:
        step: Runs a training step on all ranks and returns when it is done on all.
        settings: How often.
        report: Takes the measurement so far, from the first that has an interval on.
        agree: Returns rank 0's value on every rank.
    """
    for _ in range(settings.warmup):
        step()
    seconds: list[float] = []
    start = time.perf_counter()
    next_report = LEAST_STEPS
    while True:
        before = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - before)
        measured = StepMeasurement(statistics.median(seconds), median_interval(seconds), len(seconds))
        over = time.perf_counter() - start > settings.max_seconds or len(seconds) >= settings.max_steps
        if agree(measured.interval is not None and (over or measured.is_narrow(settings.precision))):
            return measured
        if measured.steps == next_report:
            report(measured)
            next_report = math.ceil(REPORT_GROWTH * next_report)
