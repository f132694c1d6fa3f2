"""The end of a process: gloo's worker threads let go of Python's tensors before the interpreter shuts down.

A worker thread drops the tensors of a collective after the main thread has got the result, and needs the interpreter's
lock (GIL) to do so. Before version 3.14, Python ends a thread that asks for the lock while the interpreter shuts down. Here
that happens inside of a C++ destructor, so the process aborts with "terminate called without an active exception" (status
134), although all went well. ``destroy_process_group`` does not prevent it: it neither waits for these threads nor ends them
while anybody, such as a mesh or a model, still holds the group.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

THREAD_NAME = "pt_gloo_runloop"
"""Linux's name of the threads that run gloo's collectives."""
_TASKS = Path("/proc/self/task")
_PAUSE = 0.01
"""Seconds between two looks; a thread that waits for the interpreter's lock wakes up every 5 ms."""
_LIMIT = 5.0
"""Seconds after which the process ends anyway."""


def wait_for_gloo_threads() -> None:
    """Return when no worker thread of gloo is about to need the interpreter's lock.

    This is not collective: a thread that waits for another rank, which may be gone, sleeps as an idle one does.
    """
    if not _TASKS.exists():
        time.sleep(10 * _PAUSE)
        return
    end, before = time.monotonic() + _LIMIT, None
    while (now := _threads()) and time.monotonic() < end:
        if now == before and all(state.startswith("S") for state, *_ in now.values()):
            return
        before = now
        time.sleep(_PAUSE)  # which leaves the lock to those that wait for it


def _threads() -> dict[str, list[str]]:
    """State of each worker thread of gloo, and how often it has stopped running so far."""
    found = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it may end meanwhile
            lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
            facts = {name: value.strip() for name, _, value in lines}
            if facts["Name"] == THREAD_NAME:
                found[task.name] = [facts["State"], *(facts[name] for name in facts if name.endswith("ctxt_switches"))]
    return found


atexit.register(wait_for_gloo_threads)
