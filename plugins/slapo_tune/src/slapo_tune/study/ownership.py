"""Ownership of running trials: the process that runs one, and whether it is still there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_SECONDS = 60.0
"""Seconds after its time limit at which a trial of another machine counts as abandoned."""


def own_process() -> dict[str, Any]:
    """Return data that identify this process: host, number, and start time."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid()), "time": time.time()}


def is_alive(owner: Mapping[str, Any], time_limit: float | None) -> bool:
    """Return whether the process that ``own_process`` described may still run its trial.

    Args:
        owner: What ``own_process`` returned there.
        time_limit: Time limit of its trial in seconds, by which a process of another machine is judged.
    """
    if owner.get("host") != socket.gethostname():
        return time_limit is None or time.time() < float(owner.get("time", 0.0)) + time_limit + GRACE_SECONDS
    pid = int(owner.get("pid", 0))
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
