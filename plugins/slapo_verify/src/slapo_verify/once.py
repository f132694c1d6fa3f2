"""What ranks that are threads of one process need not each compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ._torch_private import BACKEND
from .meeting import Ranks

T = TypeVar("T")

_OFFERS: dict[int, _Offer] = {}


class _Offer:
    """What a thread is given, and what it made of it, for the others to see."""

    def __init__(self, given: Any) -> None:
        self.given, self.results = given, list[Any]()


def once(run: Callable[[], T], given: Any, is_for_all: Callable[[T], bool], ranks: Ranks) -> T:
    """What ``run`` returns; of the first rank, where ranks are threads that are given the same. Collective.

    Args:
        run: Goes by what every rank gives alike.
        given: What else it goes by; tensors in lists, tuples and dicts.
        is_for_all: Whether what the first one made is that of every rank.
        ranks: Those that run it.
    """
    if not (dist.is_initialized() and dist.get_backend() == BACKEND):
        return ranks.alike(run)
    own = _Offer(given)
    _OFFERS[id(own)] = own
    try:
        first = _OFFERS[ranks.gather(id(own))[0]]
        is_mine = own is first or not _same(first.given, given)
        ranks.alike(lambda: own.results.append(run()) if is_mine else None)
        if not is_mine and is_for_all(first.results[0]):
            own.results = first.results
        ranks.alike(lambda: None if own.results else own.results.append(run()))
        found: T = own.results[0]
        return found
    finally:
        del _OFFERS[id(own)]


def _same(one: Any, other: Any) -> bool:
    (leaves, shape), (others, other_shape) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return shape == other_shape and all(map(_same_leaf, leaves, others))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (type(one) is type(other) and one.dtype is other.dtype and torch.equal(one, other))
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
