"""Random states, for a recomputation that draws the same numbers as the forward."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from slapo_core import rng_state, set_rng_state

from .value_kinds import Kind, kind_of, numpy_random


class RandomState:
    """The present state of torch's default and tracked generators, of Python's ``random``, and of NumPy's if it is loaded."""

    def __init__(self) -> None:
        self._device = _cuda_device()
        self._torch = rng_state()
        self._python = random.getstate()
        numpy = numpy_random()
        self._numpy = None if numpy is None else numpy.get_state()

    def covers(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether the state includes the generators of all devices of ``tensors``.

        It includes those of the CPU and of the current CUDA device. While CUDA is not initialized but could be in the forward,
        return False.
        """
        if self._device is None and torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return False
        devices = {(tensor.device.type, tensor.device.index) for tensor in tensors}
        return all(kind in ("cpu", "meta") or (kind, index) == ("cuda", self._device) for kind, index in devices)

    @contextmanager
    def restore_for_block(self) -> Iterator[None]:
        """Restore this state for the block; afterwards put back the state from before the block."""
        with self._on_device():
            now = RandomState()
            self._restore()
        try:
            yield
        finally:
            with self._on_device():
                now._restore()

    def _restore(self) -> None:
        set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            numpy_random().set_state(self._numpy)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the CUDA device of this state current; a backward may run with another."""
        if self._device is None or self._device == _cuda_device():
            return nullcontext()
        return torch.cuda.device(self._device)


def _cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


class GeneratorState:
    """The present state of generators other than the default ones.

    Args:
        generators: Generators of torch, NumPy or Python's ``random.Random``; duplicates are allowed.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        once = {id(generator): generator for generator in generators}
        self._start = [(generator, _read(generator)) for generator in once.values()]

    def keep_changed(self) -> None:
        """Drop the generators that drew nothing since."""
        self._start = [(generator, state) for generator, state in self._start if not _same(_read(generator), state)]

    @contextmanager
    def restore_for_block(self) -> Iterator[None]:
        """Restore these states for the block; afterwards put back the states from before the block."""
        now = [(generator, _read(generator)) for generator, _ in self._start]
        _write(self._start)
        try:
            yield
        finally:
            _write(now)


def generators_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the generators in a value: the value itself, or those in a container at any depth."""
    kind = kind_of(type(value))
    if kind is Kind.GENERATOR:
        yield value
        return
    if kind is not Kind.CONTAINER and kind is not Kind.NESTED:
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    for each in value.values() if isinstance(value, dict) else value:
        if kind_of(type(each)) is not Kind.ATOM:
            yield from generators_in(each, seen)


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
    """Return the bit generator of a NumPy generator."""
    return getattr(generator, "bit_generator", generator)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)
