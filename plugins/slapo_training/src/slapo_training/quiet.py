"""Leaving out what others' code warns of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave out the warnings of an engine's own code, which its authors have to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
