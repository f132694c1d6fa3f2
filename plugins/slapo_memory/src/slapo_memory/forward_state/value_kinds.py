"""Kinds of values, cached per class: a checkpoint inspects thousands of values in each forward."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import torch
from torch import nn

CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
"""Classes of containers whose content a recomputation restores."""

ATOMS = frozenset(
    {type(None), type(...), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Classes of immutable values with nothing inside."""


class Kind(Enum):
    """Kind of a value, by its treatment in a checkpoint."""

    ATOM = auto()
    """An immutable value; nothing to restore."""
    TENSOR = auto()
    MODULE = auto()
    GENERATOR = auto()
    """A random generator of torch, NumPy or Python."""
    CONTAINER = auto()
    """A container of a class in ``CONTAINERS``, whose content is restored."""
    NESTED = auto()
    """A tuple or another container, which is only searched for generators."""
    OTHER = auto()


def _kind_of(cls: type) -> Kind:
    if cls in ATOMS:
        return Kind.ATOM
    numpy = numpy_random()  # its generators have no instances before it is imported
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    generators = (torch.Generator, random.Random, *of_numpy)
    for base, kind in ((torch.Tensor, Kind.TENSOR), (nn.Module, Kind.MODULE), (generators, Kind.GENERATOR)):
        if issubclass(cls, base):
            return kind
    if cls in CONTAINERS:
        return Kind.CONTAINER
    return Kind.NESTED if issubclass(cls, (dict, list, tuple, set, deque)) else Kind.OTHER


kind_of: Callable[[type], Kind] = lru_cache(maxsize=512)(_kind_of)
"""Returns the kind of a class's instances."""


def numpy_random() -> Any:
    """Return NumPy's random module, or None if NumPy was not imported: then nothing draws from it."""
    return getattr(sys.modules.get("numpy"), "random", None)
