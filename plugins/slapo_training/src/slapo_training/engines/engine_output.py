"""Output of an engine's own code: numbers of steps in its log, and warnings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings inside: those of an engine's own code are for its authors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
