"""Suppression of warnings of an engine's own code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings inside: those of an engine's own code are for its authors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
