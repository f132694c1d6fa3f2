"""Results that ranks which are threads of one process compute once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ._torch_private import BACKEND
from .failure_propagation import Ranks

T = TypeVar("T")

_OFFERS: dict[int, _Offer] = {}


class _Offer:
    """Result of one thread, which the others see."""

    def __init__(self) -> None:
        self.results = list[Any]()


def computed_once(run: Callable[[], T], is_for_all: Callable[[T], bool], ranks: Ranks) -> T:
    """Return the result of ``run``; that of the first rank where ranks are threads. Collective.

    Args:
        run: Goes by what every rank is given alike.
        is_for_all: Whether what the first one made is that of every rank.
        ranks: Those that run it.
    """
    if not (dist.is_initialized() and dist.get_backend() == BACKEND):
        return ranks.alike(run)
    own = _Offer()
    _OFFERS[id(own)] = own
    try:
        first = _OFFERS[ranks.gather(id(own))[0]]
        ranks.alike(lambda: own.results.append(run()) if own is first else None)
        if own is not first and is_for_all(first.results[0]):
            own.results = first.results
        ranks.alike(lambda: None if own.results else own.results.append(run()))
        found: T = own.results[0]
        return found
    finally:
        del _OFFERS[id(own)]
