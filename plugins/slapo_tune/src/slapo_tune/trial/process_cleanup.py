"""Search for the processes of a trial by a mark in their environment, and their end.

As a program it is the watcher of a trial: it kills the trial's processes if the tuner was killed. It imports only the
standard library, as one is started for every trial.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.01
KILL_SECONDS = 10.0
"""Seconds to wait for killed processes; a process that waits for a device may take longer."""

START_SECONDS = 0.2
"""Seconds until a process that the tuner was starting when it was killed has its own environment."""


def kill_trial_processes(mark: str) -> list[int]:
    """Kill all processes with ``VARIABLE=value`` in their environment, in any session, and return those that do not end."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := [*_processes_with_mark(mark)]) and time.monotonic() < deadline:
        for pid in found:  # repeated, as a process may have started another
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return found


def _processes_with_mark(mark: str) -> Iterator[int]:
    """Iterate over the processes with the mark, by Linux's table of processes; elsewhere there are none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


if __name__ == "__main__":
    if not sys.stdin.buffer.read():  # the pipe was closed without a word
        time.sleep(START_SECONDS)
        kill_trial_processes(sys.argv[1])
