"""The one place that knows how Python's and NumPy's global generators lie in memory.

To read the state of one takes up to 40 microseconds, to look at its memory less than one. Equal bytes are an equal state:
all of a Mersenne Twister's state is inside of the object. Where a test on generators of our own does not find that, in
another Python for one, every state is read.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import ne
from typing import Any

_HEADER = object.__basicsize__
"""Bytes with the count of references and the class."""

_IS_ADDRESS = sys.implementation.name == "cpython"
"""Whether an object's id is its address."""


class WatchedGenerator:
    """A global generator, whose state is read only where it may have changed since the last time.

    Args:
        image: Returns what changes whenever the generator's state does; None where nothing is known to.
        read: Returns the state.
        write: Sets the state.
    """

    def __init__(self, image: Callable[[], Any], read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._image, self._read, self._write = image, read, write
        self._last: tuple[Any, Any] = None, None

    def state(self) -> Any:
        """Return the state; the same object as before only if it is equal."""
        now = self._image()
        image, last = self._last
        if now is not None and now == image:
            return last
        state = self._read()
        if now is not None and self._image() == now:  # no other thread drew meanwhile
            self._last = now, state
        return state

    def put(self, state: Any) -> None:
        """Set the state, unless it is this."""
        if self._last[1] is not state or self.state() is not state:
            self._write(state)


def python_generator() -> WatchedGenerator:
    """Return what the functions of ``random`` draw from."""
    watched = getattr(random.getstate, "__self__", None)
    is_known = _IS_ADDRESS and type(watched) is random.Random and _is_python_known()
    return WatchedGenerator(_python_image(watched) if is_known else _no_image, random.getstate, random.setstate)


def numpy_generator(numpy: Any) -> WatchedGenerator:
    """Return what the functions of ``numpy.random``, which ``numpy`` is, draw from."""
    watched = getattr(numpy.get_state, "__self__", None)
    is_known = _IS_ADDRESS and type(watched) is numpy.RandomState and _is_twister(watched, numpy) and _is_numpy_known(numpy)
    return WatchedGenerator(_numpy_image(watched) if is_known else _no_image, numpy.get_state, numpy.set_state)


def _python_image(generator: Any) -> Callable[[], Any]:
    memory = _memory_of(generator)
    return lambda: (memory.raw, generator.gauss_next)  # the second of a pair of normal numbers


def _numpy_image(generator: Any) -> Callable[[], Any]:
    bits = generator._bit_generator
    memory, inside = _memory_of(generator), _memory_of(bits)
    return lambda: (memory.raw, inside.raw) if generator._bit_generator is bits else None  # somebody may put in another


def _no_image() -> None:
    return None


def _memory_of(value: Any) -> Any:
    """Return a view of an object of a class in C, without what it points to; the object has to outlive it."""
    return (ctypes.c_char * (type(value).__basicsize__ - _HEADER)).from_address(id(value) + _HEADER)


def _is_twister(generator: Any, numpy: Any) -> bool:
    return type(generator._bit_generator) is numpy.MT19937


def _is_python_known() -> bool:
    own = random.Random(0)
    normal = partial(own.gauss, 0, 1)
    return _is_seen(_python_image(own), [own.random, normal, normal, partial(own.seed, 1), partial(own.seed, 2)])


def _is_numpy_known(numpy: Any) -> bool:
    own = numpy.RandomState(0)
    normal = own.standard_normal
    other = partial(own.set_state, (*own.get_state()[:3], 1, 0.5))  # another second of a pair of normal numbers
    changes = [own.rand, normal, normal, normal, other, partial(own.seed, 1), partial(own.seed, 2)]
    return _is_twister(own, numpy) and _is_seen(_numpy_image(own), changes)


def _is_seen(image: Callable[[], Any], changes: Iterable[Callable[[], Any]]) -> bool:
    """Return whether an image is stable, and is another after each change."""
    images = [image()]
    for change in changes:
        change()
        images.append(image())
        if image() != images[-1]:
            return False
    return all(map(ne, images, images[1:]))
