"""Numbers with their units, as readers of a page expect them."""

from __future__ import annotations

import math
from typing import NamedTuple


class Scale(NamedTuple):
    """A unit that values are shown in.

    Args:
        unit: Name of the unit, e.g. ``"GiB"``; empty for plain numbers.
        size: Value of one unit, e.g. ``2**30`` for bytes in GiB.
    """

    unit: str
    size: float

    def format(self, value: float) -> str:
        """Return a value with its unit and three significant digits, e.g. ``"61.2 GiB"``."""
        number = _three_digits(value / self.size)
        return f"{number} {self.unit}" if self.unit else number


_BYTES = tuple(Scale(unit, 2 ** (10 * power)) for power, unit in enumerate("bytes KiB MiB GiB TiB PiB".split()))
_SECONDS = (Scale("us", 1e-6), Scale("ms", 1e-3), Scale("s", 1.0), Scale("min", 60.0), Scale("h", 3600.0))
_COUNTS = tuple(Scale(unit, 1000**power) for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E")))


def byte_scale(largest: float) -> Scale:
    """Return the largest binary unit of which ``largest`` bytes have one or more."""
    return _scale_for(_BYTES, largest)


def second_scale(largest: float) -> Scale:
    """Return the unit for times up to ``largest`` seconds: minutes from 2 minutes on, hours from 2 hours on."""
    return _scale_for(_SECONDS, largest / 2 if largest >= 60 else largest)


def format_bytes(count: float) -> str:
    """Return a number of bytes in the fitting binary unit, e.g. ``"1.50 GiB"``."""
    return byte_scale(count).format(count)


def format_seconds(seconds: float) -> str:
    """Return a time in the fitting unit, e.g. ``"12.5 ms"``."""
    return second_scale(seconds).format(seconds)


def format_flops(count: float) -> str:
    """Return a number of floating-point operations, e.g. ``"3.20 PFLOP"``."""
    scale = _scale_for(_COUNTS, count)
    return f"{_three_digits(count / scale.size)} {scale.unit}FLOP"


def format_percent(share: float) -> str:
    """Return a share of 1 in per cent, e.g. ``"12.5%"``."""
    return f"{100 * share:.1f}%" if abs(share) < 0.9995 else f"{100 * share:.0f}%"


def format_count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _scale_for(scales: tuple[Scale, ...], largest: float) -> Scale:
    """Return the largest unit of which there is one or more once rounded to three digits."""
    fitting = [scale for scale in scales if abs(largest) >= 0.9995 * scale.size]
    return fitting[-1] if fitting else scales[0]


def _three_digits(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.2g}"
