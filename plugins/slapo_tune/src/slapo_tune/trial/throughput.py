"""The throughput of a trial, read from what its script printed."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slapo_core import default_registry

KEYS = ("throughput", "samples_per_second")
"""Names of the throughput in a line of JSON; the first that is there counts."""


def printed_result(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the last line that is a JSON object with a throughput in it, or None."""
    return next(filter(None, map(_result, reversed(lines))), None)


def _result(line: str) -> dict[str, Any] | None:
    text = line.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        found = json.loads(text, parse_float=_finite_float, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (key := next((key for key in KEYS if key in found), None)) is None:
        return None
    return {**found, "throughput": found[key]}


def _finite_float(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else text


def logged_result(lines: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the throughput by the log parser of the first dialect that finds one in these lines, or None.

    The first logged step is left out where there are several, as it includes what is done once. The median of the others
    counts. ``batch_size`` of the symbols' values counts where a log has seconds alone.
    """
    for target, dialect in default_registry().load_all("dialect").items():
        parser: Any = dialect.classes.get("log_parser")
        if parser is None or not hasattr(parser, "parse"):
            continue
        speeds = _speeds(parser, lines, values)
        if speeds:
            return {"throughput": statistics.median(speeds[1:] or speeds), "log_parser": target}
    return None


def _speeds(parser: Any, lines: Sequence[str], values: Mapping[str, Any]) -> list[float]:
    try:
        steps = parser.parse(lines)
    except ValueError:  # words of another program where this one prints a number
        return []
    return [speed for step in steps if (speed := _speed(step, values))]


def _speed(step: Any, values: Mapping[str, Any]) -> float | None:
    """Return the samples a second of a logged step: as printed, or by its seconds and the size of its batch."""
    if (printed := getattr(step, "samples_per_second", None)) is not None:
        return float(printed)
    seconds = getattr(step, "seconds", None)
    size = getattr(step, "batch_size", None) or values.get("batch_size")
    return float(size) / seconds if seconds and isinstance(size, (int, float)) else None


def invalid_throughput(throughput: Any) -> str:
    """Return the reason why a throughput cannot be compared with others, or ``""``."""
    if isinstance(throughput, bool) or not isinstance(throughput, (int, float)):
        return f"the throughput is {throughput!r}, not a number"
    if not 0 < throughput <= sys.float_info.max:
        return f"the throughput is {throughput!r}, not a number above 0"
    return ""


def error_tail(text: str, limit: int = 400) -> str:
    """Return the end of a text in one line, at most ``limit`` characters: of a traceback what stands behind its frames."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-4:]
    frames = [place for place, line in enumerate(lines[:-1], 1) if line[0].isspace()]
    joined = " | ".join(map(str.strip, lines[frames[-1] if frames else 0 :]))
    return joined if len(joined) <= limit else f"...{joined[-limit:]}"
