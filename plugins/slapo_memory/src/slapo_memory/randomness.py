"""Everything that decides which random numbers come next, for a recompute that draws what the forward drew."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slapo_core.random import rng_state, set_rng_state


class RandomState:
    """The state as of now of torch's generators with the tracked ones, of Python's ``random``, and of NumPy's where loaded."""

    def __init__(self) -> None:
        self._torch = rng_state()
        self._python = random.getstate()
        numpy = _numpy_random()
        self._numpy = None if numpy is None else numpy.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block in this state; afterwards the state is that of before the block."""
        now = RandomState()
        self._restore()
        try:
            yield
        finally:
            now._restore()

    def _restore(self) -> None:
        set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)


def _numpy_random() -> Any:
    """NumPy's module of random numbers; None while nobody imported it, as then nobody draws from it."""
    return getattr(sys.modules.get("numpy"), "random", None)
