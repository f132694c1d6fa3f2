"""Results that ranks which are threads of one process compute once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ._torch_private import BACKEND
from .failure_propagation import Ranks

T = TypeVar("T")

_SHARED: dict[int, list[Any]] = {}
"""Id of a thread's list to the list, which has its result, or another thread's."""


def compute_once(run: Callable[[], T], is_for_all: Callable[[T], bool], ranks: Ranks) -> T:
    """Return the result of ``run``; if ranks are threads, that of the first rank where it ``is_for_all``. Collective."""
    if not (dist.is_initialized() and dist.get_backend() == BACKEND):
        return ranks.run_on_all(run)
    own: list[T] = []
    _SHARED[id(own)] = own
    try:
        first = _SHARED[ranks.gather(id(own))[0]]
        ranks.run_on_all(lambda: own.append(run()) if own is first else None)
        if own is not first and is_for_all(first[0]):
            own += first
        ranks.run_on_all(lambda: None if own else own.append(run()))
        return own[0]
    finally:
        del _SHARED[id(own)]
