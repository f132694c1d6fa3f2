"""Axes of charts: the part of the plot at which a value lies, and round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis.

    Args:
        low: Value at its beginning.
        high: Value at its end; above ``low``.
        ticks: Values to label.
        log: Whether it is logarithmic.
    """

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value in percent of the axis; values outside are put at the nearer end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return min(100.0, max(0.0, 100 * (value - low) / (high - low)))


def linear_axis(values: Iterable[float], num_ticks: int = 5) -> Axis:
    """Return an axis over the finite values, with round ticks and a margin at both ends."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    step = _round_step((high - low) / num_ticks)
    first = math.ceil(low / step)
    return Axis(low, high, [index * step for index in range(first, math.floor(high / step) + 1)])


def log_axis(values: Iterable[float], floor: float) -> Axis:
    """Return an axis of whole decades over the finite values; values below ``floor``, including zero, lie at ``floor``."""
    finite = [max(value, floor) for value in values if math.isfinite(value)] or [floor]
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    high = max(high, low + 1)
    every = max(1, (high - low) // 5)
    return Axis(10.0**low, 10.0**high, [10.0**power for power in range(low, high + 1, every)], log=True)


def step_axis(num_steps: int, num_ticks: int = 6) -> Axis:
    """Return an axis over steps 1 to ``num_steps``, with integer ticks that include the first and the last."""
    every = max(1, int(_round_step(num_steps / num_ticks)))
    inner = [step for step in range(every, num_steps, every) if num_steps - step > every / 2 and step > 1]
    return Axis(1, max(num_steps, 2), sorted({1, *inner, num_steps}))


def integer_axis(first: int, last: int, num_ticks: int = 6) -> Axis:
    """Return an axis over the integers ``first`` to ``last`` with integer ticks, and room for a mark at both ends."""
    every = max(1, int(_round_step(max(last - first, 1) / num_ticks)))
    ticks = range(math.ceil(first / every) * every, last + 1, every)
    return Axis(first - 0.5, last + 0.5, list(ticks))


def axis_from_zero(largest: float, num_ticks: int = 5) -> Axis:
    """Return an axis from 0 to ``largest``, which must not be negative, with round ticks."""
    high = largest if largest > 0 else 1.0
    step = _round_step(high / num_ticks)
    return Axis(0.0, high, [index * step for index in range(math.floor(high / step * (1 + 1e-9)) + 1)])


def _round_step(rough: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
