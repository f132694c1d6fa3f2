"""Numbers of steps in the lines that an engine prints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


def log_fields(lines: Iterable[str], patterns: Mapping[str, re.Pattern[str]]) -> dict[int, dict[str, float]]:
    """Return the numbers in the lines of a log, by step in order and by the names of their patterns.

    Each pattern has groups ``step`` and ``value``; lines in which none is found are passed over.
    """
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        for name, pattern in patterns.items():
            if (match := pattern.search(line)) is not None:
                found.setdefault(int(match["step"]), {})[name] = float(match["value"])
    return dict(sorted(found.items()))
