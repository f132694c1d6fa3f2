"""Private names of torch: the process groups of threads of its own tests. ``test_ranks.py`` tells when they move."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")
BACKEND = "threaded"
"""Name of the backend; it is there inside of ``threaded_groups``."""


@contextmanager
def threaded_groups(waiting: Callable[[Callable[[], Any]], Any]) -> Iterator[Callable[[BaseException], None]]:
    """Process groups belong to the thread that makes them, for a block.

    Args:
        waiting: Is given what waits for other threads, and calls it.

    Yields:
        What ends all threads that wait, with ``SystemExit``.
    """
    private: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")

    places = [(private.Collective, "join"), (private, "_store_based_barrier")]
    before = [getattr(place, name) for place, name in places]
    c10d: Any = torch._C._distributed_c10d
    isolated = c10d._set_thread_isolation_mode  # names of groups are each thread's own
    private._install_threaded_pg()
    isolated(True)
    for (place, name), original in zip(places, before, strict=True):
        setattr(place, name, _handing_over(original, waiting))
    try:
        yield private.ProcessLocalGroup.exception_handle
    finally:
        for (place, name), original in zip(places, before, strict=True):
            setattr(place, name, original)
        private.ProcessLocalGroup.reset()
        isolated(False)
        private._uninstall_threaded_pg()


def _handing_over(original: Callable[..., T], waiting: Callable[[Callable[[], T]], T]) -> Callable[..., T]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> T:
        return waiting(lambda: original(*args, **kwargs))

    return call
