"""Ownership of running trials: the process that runs one, and whether it is still there."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_SECONDS = 60.0
"""Seconds after its time limit at which a trial of another machine counts as abandoned."""


_RUNS: set[str] = set()
"""Runs of tuners in this process that have not ended."""


def start_run() -> str:
    """Return the name of a new run of a tuner in this process, which lasts until :func:`end_run`."""
    _RUNS.add(name := uuid.uuid4().hex)
    return name


def end_run(name: str) -> None:
    """End a run: the trials that it still owns are abandoned."""
    _RUNS.discard(name)


def own_process(run: str = "") -> dict[str, Any]:
    """Return data that identify a run in this process: host, number and start time of the process, and the run."""
    process = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())}
    return {**process, "run": run, "time": time.time()}


def is_alive(owner: Mapping[str, Any], time_limit: float | None) -> bool:
    """Return whether the process that ``own_process`` described may still run its trial.

    Args:
        owner: What ``own_process`` returned there.
        time_limit: Time limit of its trial in seconds, by which a process of another machine is judged.
    """
    if owner.get("host") != socket.gethostname():
        return time_limit is None or time.time() < float(owner.get("time", 0.0)) + time_limit + GRACE_SECONDS
    pid = int(owner.get("pid", 0))
    if pid == os.getpid():
        return owner.get("run") in _RUNS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _start_time(pid) == owner.get("started") and not _is_zombie(pid)


def _stat(pid: int) -> list[str]:
    """Return the fields behind a process's name in Linux's table of processes; elsewhere none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _start_time(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == ["Z"]
