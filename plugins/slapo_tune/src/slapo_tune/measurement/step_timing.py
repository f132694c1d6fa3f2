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

SLOWER = 1.1
"""A schedule is not measured further once its interval begins at this multiple of the best schedule's seconds."""


@dataclass(frozen=True)
class StepMeasurement:
    """Seconds of a training step.

    Args:
        seconds: The median.
        interval: 95 % interval of the median; None with fewer than ``LEAST_STEPS`` steps.
        steps: Steps that were measured.
        pruned: Whether measuring ended because the schedule is slower than the best one.
    """

    seconds: float
    interval: tuple[float, float] | None
    steps: int
    pruned: bool = False


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
    best: float | None,
    agree: Callable[[bool], bool],
) -> StepMeasurement:
    """Run steps until their median is known well enough.

    Args:
        step: Runs a training step on all ranks and returns when it is done on all.
        settings: How often.
        best: Seconds of a step of the best schedule so far.
        agree: Returns rank 0's value on every rank.
    """
    for _ in range(settings.warmup):
        step()
    seconds: list[float] = []
    start = time.perf_counter()
    pruned = done = False
    while not done:
        before = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - before)
        interval = median_interval(seconds)
        pruned = interval is not None and best is not None and interval[0] > SLOWER * best
        over = time.perf_counter() - start > settings.max_seconds or len(seconds) >= settings.max_steps
        done = agree(pruned or interval is not None and (over or _is_narrow(seconds, interval, settings.precision)))
    return StepMeasurement(statistics.median(seconds), median_interval(seconds), len(seconds), pruned)


def _is_narrow(seconds: Sequence[float], interval: tuple[float, float], precision: float) -> bool:
    return (interval[1] - interval[0]) / 2 <= precision * statistics.median(seconds)
