"""Ranks as threads of one process.

Threads share state that ranks have separately: the random state, and temporary changes of classes by tracing. Therefore one
thread runs at a time, and switches only in collectives, where its random state is saved. No rank sees the intermediate state of
another between two collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from slapo_core import VerifyError, rng_state, set_rng_state

from ._torch_private import BACKEND, threaded_groups
from .failure_propagation import THREAD_ERRORS, Ranks

T = TypeVar("T")

_DEADLOCK_SECONDS = 3.0
"""Time for which all ranks may wait in collectives before this is treated as a deadlock."""


def run_as_threads(work: Callable[[], T], world_size: int) -> list[T]:
    """Run ``work`` on ``world_size`` ranks of one default process group, each a thread of this process; on CPUs only.

    The random state of this process is restored. Only one call at a time is allowed.

    Returns:
        The result of each rank.

    Raises:
        VerifyError: ranks wait for each other in different collectives, one ended itself, or a process group exists already.
        Exception: the error of the rank that failed first.
    """
    if type(world_size) is not int or world_size < 1:
        raise VerifyError(f"world_size is {world_size!r}; give a whole number from 1 on")
    if dist.is_initialized():
        raise VerifyError("there is a process group in this process already; ranks cannot be threads of it")
    ranks, state = _ThreadRanks(world_size), rng_state()
    THREAD_ERRORS.clear()
    try:
        with threaded_groups(ranks.let_others_run) as end:
            threads = [threading.Thread(target=ranks.run, args=(rank, work), daemon=True) for rank in range(world_size)]
            for thread in threads:
                thread.start()
            ranks.watch(threads, end)
    finally:
        set_rng_state(state)
        first = next(iter(THREAD_ERRORS), None)
        THREAD_ERRORS.clear()
    if ranks.error is not None:
        raise first if first is not None and isinstance(ranks.error, Exception) else ranks.error
    return [ranks.results[rank] for rank in range(world_size)]


class _ThreadRanks:
    """Ranks as threads, one of which runs at a time."""

    def __init__(self, world_size: int) -> None:
        self.results: dict[int, Any] = {}
        self.error: BaseException | None = None
        self._size, self._turn = world_size, threading.Lock()
        self._store = HashStore()
        self._number_waiting = self._met = 0

    def run(self, rank: int, work: Callable[[], Any]) -> None:
        """Run the work of one rank in its thread."""
        try:
            with self._turn:
                dist.init_process_group(BACKEND, rank=rank, world_size=self._size, store=self._store)
                self.results[rank] = work()
                dist.destroy_process_group()
        except SystemExit as caught:  # torch ends so what waits for a thread that failed, too
            self.error = self.error or VerifyError(f"rank {rank} ended itself, by SystemExit({caught.code!r})")
        except BaseException as caught:
            self.error = self.error or caught

    def let_others_run(self, call: Callable[[], T]) -> T:
        """Let the other threads run while this one waits for them."""
        state = rng_state()
        self._number_waiting += 1
        self._turn.release()
        try:
            return call()
        finally:
            self._turn.acquire()
            self._number_waiting -= 1
            self._met += 1
            set_rng_state(state)

    def watch(self, threads: list[threading.Thread], end: Callable[[BaseException], None]) -> None:
        """Wait until all threads have ended. End the others if one has failed, or in a deadlock."""
        since, met = time.monotonic(), -1
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(0.02)
            if self._met != met or self._number_waiting < len(alive):
                since, met = time.monotonic(), self._met
            elif self.error is None and time.monotonic() - since > _DEADLOCK_SECONDS:
                self.error = VerifyError("the ranks wait for each other in different collectives: one of them left some out")
            if self.error is not None:
                end(self.error)


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
