"""Processes with a mark in their environment, and the end of them.

As a program it waits beside a trial, and kills the trial's processes where the tuner was killed before it could do so.
It imports the standard library alone, since one is started for every trial.
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
"""How long processes that were killed are waited for; those that wait for a device may take longer."""

START_SECONDS = 0.2
"""How long a process that the tuner was starting when it ended may take until it has its own environment."""


def kill_trial_processes(mark: str) -> list[int]:
    """Kill all processes with ``VARIABLE=value`` in their environment, in any session, and return those that do not end."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := [*_marked(mark)]) and time.monotonic() < deadline:
        for pid in found:  # again, as one may have started another meanwhile
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return found


def _marked(mark: str) -> Iterator[int]:
    """Iterate over the processes with the mark, by Linux's table of processes; elsewhere there are none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


if __name__ == "__main__":
    if not sys.stdin.buffer.read():  # the pipe was closed without a word
        time.sleep(START_SECONDS)
        kill_trial_processes(sys.argv[1])
