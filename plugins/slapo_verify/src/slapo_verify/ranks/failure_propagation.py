"""Ranks that run a model together, of which one may fail: no other waits for it for ever."""

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

PATIENCE = 20.0
"""Seconds, from when a rank has failed, in which the others may come out of their collectives by themselves."""

_LONGEST_PAUSE = 0.05
"""Seconds between two looks at who has come, at most."""

FAILED: list[BaseException] = []
"""Errors of ranks that are threads, which the others have not heard yet."""


class StrandedError(VerifyError):
    """A rank failed while others waited for it in a collective. Their process groups are out of step since."""


class Meeting:
    """Meeting of processes, which tell each other through a store how what each of them runs has ended.

    Nothing travels over their process groups, in a collective of which another rank may be stuck.

    Args:
        store: Of this verification alone; every rank reaches it.
        size: How many ranks meet.
    """

    def __init__(self, store: Any, size: int) -> None:
        self._store, self._size = store, size
        self._number, self._failed_since = 0, 0.0

    @staticmethod
    def of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Meeting | None:
        """Return the meeting of a schedule's ranks; None for one rank, or without a store in common. Collective."""
        groups = list(mesh_groups(mesh, group))
        if not groups or any(dist.get_backend(each) in (BACKEND, "fake") for each in groups):
            return None
        found = gather_objects((dist.get_rank(), uuid.uuid4().hex), mesh, group)
        store = dist.PrefixStore(f"slapo_verify/{found[0][1]}", default_store())  # type: ignore[attr-defined]
        return Meeting(store, len({rank for rank, _ in found}))

    def alike(self, run: Callable[[], T], watched: bool = True) -> T:
        """Return the result of ``run``; where one rank fails, all do. Every rank calls this as often as the others.

        Args:
            run: May be collective.
            watched: Whether its collectives end in time; else they do when the processes that failed have ended.

        Raises:
            StrandedError: a rank failed, and others were still in a collective ``PATIENCE`` seconds later; the same on all.
            BuildError: another rank failed, with what the first that did so said.
            Exception: what this rank raised.
        """
        self._number, self._failed_since = self._number + 1, 0.0
        error, values = None, list[T]()
        try:
            with watched_collectives(self._look) if watched else nullcontext():
                values.append(run())
        except StrandedError:
            raise
        except BaseException as caught:
            self._tell(caught)
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
            self._look(error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self, error: Exception | None = None) -> None:
        """Raise where a rank has failed, and it is too late for the others to come by themselves."""
        if not self._failed_since:
            self._failed_since = time.monotonic() if self._store.check([self._key("failure/1")]) else 0.0
        is_late = self._failed_since and time.monotonic() - self._failed_since > PATIENCE
        if is_late or (self._failed_since and self._store.check([self._key("end")])):
            self._ends_as("stranded", error)

    def _ends_as(self, end: str, error: Exception | None) -> None:
        """Let the first rank decide how this meeting ends; raise where ranks are stranded."""
        if self._store.compare_set(self._key("end"), "", end) == b"stranded":
            rank, reason = self._first_failure()
            raise StrandedError(
                f"rank {rank} failed, and others waited in a collective for {PATIENCE:g} s more: {reason}; "
                "start the ranks again, as their process groups are out of step"
            ) from error

    def _tell(self, error: BaseException) -> None:
        order = self._store.add(self._key("failures"), 1)
        reason = str(error) if isinstance(error, SlapoError) else f"{type(error).__name__}: {error}"
        self._store.set(self._key(f"failure/{order}"), json.dumps([dist.get_rank(), reason]))

    def _first_failure(self) -> tuple[int, str]:
        rank, reason = json.loads(self._store.get(self._key("failure/1")))
        return rank, reason

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def agreed(run: Callable[[], T], mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> T:
    """Return the result of ``run``; where one rank fails, all do; for ranks that are threads, or one. Collective."""
    error, values = None, list[T]()
    try:
        values.append(run())
    except Exception as caught:
        error = caught
    is_of_threads = any(dist.get_backend(each) == BACKEND for each in mesh_groups(mesh, group))
    if error is not None and is_of_threads:
        FAILED.append(error)
    try:
        raise_on_all_ranks(error, mesh, group)
    except Exception as heard:
        if heard is error and is_of_threads:
            FAILED[:] = [each for each in FAILED if each is not error]
        raise
    return values[0]


class Ranks(NamedTuple):
    """The ranks that verify together; by default this one."""

    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    meeting: Meeting | None = None

    @staticmethod
    def of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks of a mesh and a group. Collective."""
        return Ranks(mesh, group, Meeting.of(mesh, group))

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank. Collective."""
        return gather_objects(value, self.mesh, self.group)

    def alike(self, run: Callable[[], T], watched: bool = True) -> T:
        """Return the result of ``run``; where one rank fails, all do, also where others wait for it. Collective."""
        return self.meeting.alike(run, watched) if self.meeting is not None else agreed(run, self.mesh, self.group)


ALONE = Ranks()
