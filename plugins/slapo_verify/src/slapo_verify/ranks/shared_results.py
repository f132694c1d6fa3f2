"""Results that ranks which are threads of one process compute once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ._torch_private import BACKEND
from .failure_propagation import Ranks

T = TypeVar("T")

_SHARED: dict[int, _SharedResult] = {}


class _SharedResult:
    """Result of one thread, visible to the others."""

    def __init__(self) -> None:
        self.results = list[Any]()


def compute_once(run: Callable[[], T], is_for_all: Callable[[T], bool], ranks: Ranks) -> T:
    """Return the result of ``run``; if ranks are threads, that of the first rank. Collective.

    Args:
        run: Depends only on values that are equal on every rank.
        is_for_all: Returns True if the first rank's result is valid for every rank.
        ranks: The ranks.
    """
    if not (dist.is_initialized() and dist.get_backend() == BACKEND):
        return ranks.run_on_all(run)
    own = _SharedResult()
    _SHARED[id(own)] = own
    try:
        first = _SHARED[ranks.gather(id(own))[0]]
        ranks.run_on_all(lambda: own.results.append(run()) if own is first else None)
        if own is not first and is_for_all(first.results[0]):
            own.results = first.results
        ranks.run_on_all(lambda: None if own.results else own.results.append(run()))
        found: T = own.results[0]
        return found
    finally:
        del _SHARED[id(own)]
