"""Everything that decides which random numbers come next, for a recompute that draws what the forward drew."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


class HeldState:
    """The state as of now of generators that somebody holds beside the default ones.

    Args:
        generators: Of torch, of NumPy, or Python's ``random.Random``; each once or more often.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        once = {id(generator): generator for generator in generators}
        self._start = [(generator, _read(generator)) for generator in once.values()]

    def keep_changed(self) -> None:
        """Forget those that drew nothing since."""
        self._start = [(generator, state) for generator, state in self._start if not _same(_read(generator), state)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block in these states; afterwards they are those of before the block."""
        now = [(generator, _read(generator)) for generator, _ in self._start]
        _write(self._start)
        try:
            yield
        finally:
            _write(now)


def generators_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Those that a value is or, a container, holds at any depth."""
    seen = set() if seen is None else seen
    if is_generator(value):
        yield value
    elif isinstance(value, (dict, list, tuple, set, deque)) and id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, dict) else value:
            yield from generators_in(each, seen)


def is_generator(value: Any) -> bool:
    """Whether it is one that ``HeldState`` takes."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = _numpy_random()
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator))


def _read(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator) or not hasattr(_bits(generator), "state"):
        return generator.get_state()
    return _bits(generator).state


def _write(states: Iterable[tuple[Any, Any]]) -> None:
    for generator, state in states:
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, torch.Generator) or not hasattr(_bits(generator), "state"):
            generator.set_state(state)
        else:
            _bits(generator).state = state


def _bits(generator: Any) -> Any:
    """Of a generator of NumPy's what draws its bits."""
    return getattr(generator, "bit_generator", generator)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)


def _numpy_random() -> Any:
    """NumPy's module of random numbers; None while nobody imported it, as then nobody draws from it."""
    return getattr(sys.modules.get("numpy"), "random", None)
