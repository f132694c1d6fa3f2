"""Propagation of failures between ranks that run a model together, so that no rank waits forever."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import BuildError, SlapoError, VerifyError, gather_objects, mesh_groups, raise_on_all_ranks

from ._torch_private import BACKEND, default_store, watched_collectives

T = TypeVar("T")

COLLECTIVE_GRACE_SECONDS = 20.0
"""Time after a failure of a rank in which the others may leave their collectives by themselves."""

_MAX_PAUSE = 0.05
"""Longest pause in seconds between two checks of the arrivals."""

THREAD_ERRORS: list[BaseException] = []
"""Errors of ranks that are threads, which the others have not received yet."""


class StrandedError(VerifyError):
    """A rank failed while others waited for it in a collective. Their process groups are now out of step."""


class FailureStore:
    """Store in which processes report how their run has ended.

    Reports do not use the process groups, since another rank may be stuck in a collective of these.

    Args:
        store: Store of this verification; every rank reaches it.
        size: Number of ranks.
    """

    def __init__(self, store: Any, size: int) -> None:
        self._store, self._size = store, size
        self._number, self._failed_since = 0, 0.0

    @staticmethod
    def of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> FailureStore | None:
        """Return the failure store of a schedule's ranks; None for one rank, or without a common store. Collective."""
        groups = list(mesh_groups(mesh, group))
        if not groups or any(dist.get_backend(each) in (BACKEND, "fake") for each in groups):
            return None
        found = gather_objects((dist.get_rank(), uuid.uuid4().hex), mesh, group)
        store = dist.PrefixStore(f"slapo_verify/{found[0][1]}", default_store())  # type: ignore[attr-defined]
        return FailureStore(store, len({rank for rank, _ in found}))

    def run_on_all(self, run: Callable[[], T], watched: bool = True) -> T:
        """Return the result of ``run``, or fail on all ranks if one fails. Every rank must call this equally often.

        Args:
            run: May be collective.
            watched: True to end its collectives in time after a failure; else they end when the failed processes have ended.

        Raises:
            StrandedError: a rank failed, and others were still in a collective ``COLLECTIVE_GRACE_SECONDS`` later; the same on
                all.
            BuildError: another rank failed, with the message of the first that did.
            Exception: the error of this rank.
        """
        self._number, self._failed_since = self._number + 1, 0.0
        error, values = None, list[T]()
        try:
            with watched_collectives(self._raise_if_stranded) if watched else nullcontext():
                values.append(run())
        except StrandedError:
            raise
        except BaseException as caught:
            self._report_failure(caught)
            if not isinstance(caught, Exception):
                raise
            error = caught
        self._wait_for_all(error)
        if self._store.check([self._key("failure/1")]):
            self._ends_as("met", error)
            raise error or BuildError("rank {} failed: {}".format(*self._first_failure()))
        return values[0]

    def _wait_for_all(self, error: Exception | None) -> None:
        self._store.add("arrived", 1)
        pause = 0.0005
        while self._store.add("arrived", 0) < self._number * self._size:
            self._raise_if_stranded(error)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _raise_if_stranded(self, error: Exception | None = None) -> None:
        """Raise if a rank has failed, and the time for the others to leave their collectives is over."""
        if not self._failed_since:
            self._failed_since = time.monotonic() if self._store.check([self._key("failure/1")]) else 0.0
        is_late = self._failed_since and time.monotonic() - self._failed_since > COLLECTIVE_GRACE_SECONDS
        if is_late or (self._failed_since and self._store.check([self._key("end")])):
            self._ends_as("stranded", error)

    def _ends_as(self, end: str, error: Exception | None) -> None:
        """Let the first rank decide how this run ends; raise if ranks are stranded."""
        if self._store.compare_set(self._key("end"), "", end) == b"stranded":
            rank, reason = self._first_failure()
            raise StrandedError(
                f"rank {rank} failed, and others waited in a collective for {COLLECTIVE_GRACE_SECONDS:g} s more: {reason}; "
                "start the ranks again, as their process groups are out of step"
            ) from error

    def _report_failure(self, error: BaseException) -> None:
        order = self._store.add(self._key("failures"), 1)
        reason = str(error) if isinstance(error, SlapoError) else f"{type(error).__name__}: {error}"
        self._store.set(self._key(f"failure/{order}"), json.dumps([dist.get_rank(), reason]))

    def _first_failure(self) -> tuple[int, str]:
        rank, reason = json.loads(self._store.get(self._key("failure/1")))
        return rank, reason

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def run_and_agree(run: Callable[[], T], mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> T:
    """Return the result of ``run``, or fail on all ranks if one fails; for one rank, or ranks that are threads. Collective."""
    error, values = None, list[T]()
    try:
        values.append(run())
    except Exception as caught:
        error = caught
    is_of_threads = any(dist.get_backend(each) == BACKEND for each in mesh_groups(mesh, group))
    if error is not None and is_of_threads:
        THREAD_ERRORS.append(error)
    try:
        raise_on_all_ranks(error, mesh, group)
    except Exception as heard:
        if heard is error and is_of_threads:
            THREAD_ERRORS[:] = [each for each in THREAD_ERRORS if each is not error]
        raise
    return values[0]


class Ranks(NamedTuple):
    """The ranks that verify together; by default only this one."""

    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    failure_store: FailureStore | None = None

    @staticmethod
    def of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks of a mesh and a group. Collective."""
        return Ranks(mesh, group, FailureStore.of(mesh, group))

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank. Collective."""
        return gather_objects(value, self.mesh, self.group)

    def run_on_all(self, run: Callable[[], T], watched: bool = True) -> T:
        """Return the result of ``run``, or fail on all ranks if one fails, even if others wait for it. Collective."""
        if self.failure_store is not None:
            return self.failure_store.run_on_all(run, watched)
        return run_and_agree(run, self.mesh, self.group)


SINGLE_RANK = Ranks()
