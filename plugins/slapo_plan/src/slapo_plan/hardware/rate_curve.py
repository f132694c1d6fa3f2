"""Measured values by size, interpolated between the points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import exp, log


class Curve:
    """Positive values at increasing positive sizes, linear between the points in logarithms.

    Args:
        points: Pairs of size and value.
        rises: True if values beyond the last point grow with the size, as seconds do; rates stay as they are.

    Raises:
        ValueError: there are no points, a number is not positive, or sizes do not increase.
    """

    def __init__(self, points: Iterable[Iterable[float]], rises: bool = False) -> None:
        self.points = tuple((float(size), float(value)) for size, value in points)
        self._rises = rises
        sizes = [size for size, _ in self.points]
        if not self.points or any(number <= 0 for point in self.points for number in point) or sizes != sorted({*sizes}):
            raise ValueError("a curve needs points [size, value] of positive numbers, with increasing sizes")
        self._sizes = [log(size) for size in sizes]
        self._values = [log(value) for _, value in self.points]

    def at(self, size: float) -> float:
        """Return the value at a size; below the first point it is that of the first point."""
        place = log(size) if size > 0 else self._sizes[0]
        above = bisect_left(self._sizes, place)
        if above == 0:
            return self.points[0][1]
        if above == len(self._sizes):
            last_size, last = self.points[-1]
            return last * (size / last_size if self._rises else 1.0)
        left, right = self._sizes[above - 1], self._sizes[above]
        share = (place - left) / (right - left)
        return exp(self._values[above - 1] * (1 - share) + self._values[above] * share)
